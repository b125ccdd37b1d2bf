"""The names under which clients know the models of the servers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NAME_LENGTH = 256
_NAME = re.compile(r"[\x21-\x3c\x3e-\x7e]{1,256}")  # printable ASCII without "="
_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_served_names(entries: Iterable[str]) -> dict[str, str | None]:
    """Return the model of each name in ``NAME`` or ``NAME=MODEL``; None stands for the only one.

    Raises:
        ValueError: a name cannot be one, or is given twice.
    """
    names: dict[str, str | None] = {}
    for entry in entries:
        name, separator, model = entry.partition("=")
        if not _NAME.fullmatch(name) or (separator and not _MODEL.fullmatch(model)):
            raise ValueError(
                f"must be NAME or NAME=MODEL, with at most {MAX_NAME_LENGTH} printable ASCII "
                f"characters without spaces, got {entry[:64]!a}"
            )
        if name in names:
            raise ValueError(f"the name {name} is given twice")
        names[name] = model or None
    return names


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as a client names it: one of the servers', or a LoRA adapter of it.

    ``name`` is the model's on the servers, ``shown`` the name in answers.
    """

    name: str
    shown: str
    adapter: str = ""

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of its requests, which name the adapter."""
        return {"lora_name": self.adapter} if self.adapter else {}


class ServedNames:
    """Maps names to models of the servers.

    A model without a name is served under its name on the servers. The latter is understood for
    any model, but if there are others, clients are shown those.
    """

    def __init__(self, names: Mapping[str, str | None]) -> None:
        self._names = dict(names)

    def shown(self, models: Sequence[str]) -> dict[str, str]:
        """Return the model of each name that clients are shown, given all models."""
        only = models[0] if len(models) == 1 else None
        named = {name: model or only for name, model in self._names.items()}
        found = {name: model for name, model in named.items() if model in models}
        others = {model: model for model in models if model not in found.values()}
        return {**others, **found}  # type: ignore[dict-item]  # None is in no list of models

    def model(self, name: str, models: Sequence[str]) -> str | None:
        """Return the model of a name; None if there is none."""
        return self.shown(models).get(name) or (name if name in models else None)

    def first(self, model: str, models: Sequence[str]) -> str:
        """Return a model's name in answers: the first one, as in vLLM."""
        return next((name for name, known in self.shown(models).items() if known == model), model)
