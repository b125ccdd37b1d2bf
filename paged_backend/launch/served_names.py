"""The names under which clients know a model: Triton's model has one, the gateway has more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paged_backend.launch.repository import is_model_name
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

DEFAULT_NAME = "paged_llm"
_FLAG = "--served-model-name"
_NAME = re.compile(r"[\x21-\x3c\x3e-\x7e]{1,256}")  # what the gateway takes
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of one model.

    Attributes:
        triton: the name of Triton's model.
        gateway_flags: the flags that give the gateway the other names; empty if there are none.
    """

    triton: str
    gateway_flags: tuple[str, ...] = ()


def read_names(names: Sequence[str], *, has_gateway: bool) -> ModelNames:
    """Return the names of a model: the first one, or what Triton allows of it, is Triton's.

    ``org/model`` becomes ``model``, and characters that Triton does not allow become ``_``.

    Args:
        names: as for vLLM's option of this name; the default without any.
        has_gateway: whether a gateway is started, which can have any names.

    Raises:
        ConfigError: a name needs the gateway, is given twice, or cannot be used at all.
    """
    if not names:
        return ModelNames(DEFAULT_NAME)
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{_FLAG}: must have 1 to 256 printable ASCII characters without spaces and '=', "
                f"got {shorten(name)}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"{_FLAG}: the name {shorten(name)} is given twice")
    triton = triton_name(names[0])
    if list(names) == [triton]:
        return ModelNames(triton)
    if not has_gateway:
        if len(names) > 1:
            raise ConfigError(f"{_FLAG}: several names need --openai-port, as Triton has only one")
        raise ConfigError(
            f"{_FLAG}: {shorten(names[0])} needs --openai-port; a name on Triton has letters, "
            "digits, '_', '-' and '.', and does not start with '-' or '.'"
        )
    return ModelNames(triton, (_FLAG, *(f"{name}={triton}" for name in names)))


def triton_name(name: str) -> str:
    """Return the last part of a name with slashes, with ``_`` for what Triton does not allow.

    Raises:
        ConfigError: nothing of it is left.
    """
    last = name.rstrip("/").rpartition("/")[2]
    found = _NOT_ALLOWED.sub("_", last).lstrip("-.")
    if not is_model_name(found):
        raise ConfigError(f"{_FLAG}: {shorten(name)} has no letter, digit or '_'")
    return found
