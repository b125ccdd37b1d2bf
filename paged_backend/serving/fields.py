"""Reads single values from a client's tensors and JSON; errors name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paged_backend.serving.contract import Array
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.validation import is_deeper, shorten

MAX_ELEMENTS = 2**18  # elements of a list, unless something narrower bounds it

Tensors = Mapping[str, Array]
"""Input tensors by name, without those that the client did not send."""


def flag(tensors: Tensors, name: str, *, default: bool = False) -> bool:
    """Read a boolean."""
    return bool(single(name, tensors[name])) if name in tensors else default


def single(name: str, tensor: Array) -> Any:
    """Read the only element."""
    if tensor.size != 1:
        raise InvalidRequest(name, f"must hold one element, got {tensor.size}")
    return tensor.reshape(-1)[0]


def string(name: str, tensor: Array) -> str:
    """Read the only element as text."""
    return text(name, single(name, tensor))


def elements(name: str, tensor: Array, max_number: int = MAX_ELEMENTS) -> list[Any]:
    """Read all elements.

    Raises:
        InvalidRequest: there are more than ``max_number``.
    """
    if tensor.size > max_number:
        raise InvalidRequest(name, f"has {tensor.size} elements, more than {max_number}")
    values: list[Any] = tensor.reshape(-1).tolist()
    return values


def strings(name: str, tensor: Array) -> list[str]:
    """Read all elements as text."""
    return [text(name, value) for value in elements(name, tensor)]


def text(name: str, value: Any) -> str:
    """Decode one element of a tensor of strings."""
    try:
        return value if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"is not valid UTF-8 at byte {error.start}") from error


def parse_json(name: str, source: str, max_depth: int) -> Any:
    """Parse a JSON value of bounded nesting."""
    try:
        value = json.loads(source)
    except RecursionError as error:
        raise _too_deep(name, max_depth) from error
    except ValueError as error:
        raise InvalidRequest(name, f"is not valid JSON: {shorten(str(error))}") from error
    # A text cannot be nested deeper than its number of brackets, which is quick to count.
    if source.count("[") + source.count("{") > max_depth and is_deeper(value, max_depth):
        raise _too_deep(name, max_depth)
    return value


def json_object(name: str, source: str, max_depth: int) -> dict[str, Any]:
    """Parse a JSON object of bounded nesting."""
    values = parse_json(name, source, max_depth)
    if not isinstance(values, dict):
        raise InvalidRequest(name, f"must be a JSON object, got {shorten(values)}")
    return values


def _too_deep(name: str, max_depth: int) -> InvalidRequest:
    return InvalidRequest(name, f"is nested deeper than {max_depth} levels (max_json_depth)")
