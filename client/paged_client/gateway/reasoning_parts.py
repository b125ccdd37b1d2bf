"""Reasoning in the histories of clients, in the forms in which APIs and libraries write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError

OWN_ERROR = "paged_field"
# LangChain's, Anthropic's and Mistral's, vLLM's, and OpenAI's; the first with a text counts.
_FIELDS = ("reasoning", "thinking", "text", "content", "summary")


def field_problem(name: str, problem: str) -> PydanticCustomError:
    """Return the error for a field; pydantic adds the location of the object with the field."""
    return PydanticCustomError(OWN_ERROR, "{problem}", {"name": name, "problem": problem})


def reasoning_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a part, an item or a block of reasoning.

    Returns:
        The text; empty if its fields say nothing, as with encrypted reasoning; None if it has no
        such field.

    Raises:
        PydanticCustomError: a field is neither a text nor a list of parts with texts.
    """
    given = [name for name in _FIELDS if name in part]
    texts = (_text(name, part[name]) for name in given)
    return next(filter(None, texts), "") if given else None


def _text(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = [_piece(piece) for piece in value] if isinstance(value, list) else [None]
    if None in texts:
        raise field_problem(name, "must be a string or a list of parts with texts")
    return "\n".join(filter(None, texts))


def _piece(piece: Any) -> str | None:
    """Return the text of a piece of reasoning; None if it has none."""
    text = piece.get("text") if isinstance(piece, dict) else piece
    return text if isinstance(text, str) else None
