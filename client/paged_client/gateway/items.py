"""Objects that a conversation consists of, as clients send them back.

Agents send objects of an earlier answer back with whatever fields it had. So these objects may have
unknown fields, unlike a request's own, but not an unknown type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from paged_client.gateway.reasoning_parts import field_problem, reasoning_text
from paged_client.gateway.schema.body import short

_OTHER_TYPES = frozenset(("input_image", "image", "input_file", "document", "input_audio"))


class OpenObject(BaseModel):
    """A JSON object of which only the known fields are read; null means that a field is absent."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if field is not None}


def known_type(*types: str, default: str = "") -> Callable[[Any], Any]:
    """Return a validator of objects with a ``type`` that must be one of ``types``."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type", default)
        if kind in types:
            return value
        if kind in _OTHER_TYPES:
            raise field_problem("type", f"{kind} is not supported, only {_listed(types)}")
        raise field_problem("type", f"must be {_listed(types)}, got {short(str(kind))}")

    return check


def tag_of(default: str = "") -> Callable[[Any], str]:
    """Return a discriminator by ``type``; errors leave out its tags, which are in parentheses."""

    def tag(value: Any) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else default
        return f"({kind})"

    return tag


def json_text(value: Any) -> Any:
    """Return an object or a list as JSON; other values are returned as they are."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def with_reasoning(field: str) -> Callable[[Any], Any]:
    """Return a validator that gives an object the text of its reasoning in one field."""

    def read(value: Any) -> Any:
        text = reasoning_text(value) if isinstance(value, dict) else None
        return value if text is None else {**value, field: text}

    return read


def text_or_list(value: Any) -> str:
    """Discriminate a text from a list."""
    return "(list)" if isinstance(value, list) else "(text)"


def _listed(types: Iterable[str]) -> str:
    return ", ".join(types)
