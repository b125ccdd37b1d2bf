"""Reads the calls in a region of a checkpoint's own ``response_template``, within limits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from paged_backend.parsers.schema_values import ParameterTypes, as_json

MAX_CALL_LENGTH = 2**20  # characters
MAX_STRING_WORK = 20_000_000  # strings in quotes of a template's own, times characters
ELEMENTS_TIMEOUT_S = 0.05  # for the elements of one call

Call = tuple[str, str]
"""The name, and the arguments as JSON."""


def check_field(field: Any) -> None:
    """Check a field of a template.

    Raises:
        ValueError: the time for its values cannot be limited.
    """
    inner = field.content_args.get("value_parser")
    if inner is not None and inner.get("name") in ("xml-inline", "kv-lines"):
        raise ValueError(f"Field '{field.name}': value_parser must not be {inner['name']}")
    if field.content == "xml-inline":
        _elements_pattern(field.content_args)


def calls_of(
    body: str, field: Any, captures: Mapping[str, str], types: ParameterTypes
) -> list[Call]:
    """Return the calls in the text of a region.

    Args:
        body: the text.
        field: transformers' ``ResponseTemplateField``.
        captures: groups of the regular expressions around the text.
        types: types of the tools' parameters, to which strings are converted.

    Raises:
        ValueError: the text is not a call, or reading it would take too long.
        KeyError: as above.
        TypeError: as above.
        RecursionError: as above.
        TimeoutError: as above.
    """
    from transformers.utils.chat_parsing.content_parsers import process_field

    if len(body) > MAX_CALL_LENGTH:
        raise ValueError(f"must have at most {MAX_CALL_LENGTH} characters")
    if field.content == "xml-inline":
        body = json.dumps(_elements(body, field.content_args))
        field = dataclasses.replace(field, content="json", content_args={})
    delimiters = field.content_args.get("string_delims", ()) if field.content == "json" else ()
    if sum(body.count(begin) for begin, _ in delimiters) * len(body) > MAX_STRING_WORK:
        raise ValueError("has too many strings")
    value = process_field(body, field, dict(captures))
    values = value if isinstance(value, list) else [value]
    return [_call(item, types) for item in values]


def _call(value: Any, types: ParameterTypes) -> Call:
    function = value.get("function", value) if isinstance(value, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str):
        raise ValueError("has no name")
    if isinstance(arguments, str):
        return name, arguments
    if isinstance(arguments, dict):
        arguments = {key: _typed(item, types.of(name, key)) for key, item in arguments.items()}
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _typed(value: Any, types: list[str]) -> Any:
    if isinstance(value, str):
        return json.loads(as_json(value, types))
    if isinstance(value, list) and types and "array" not in types:  # a key that is repeated
        return [_typed(item, types) if isinstance(item, str) else item for item in value]
    return value


def _elements_pattern(arguments: Mapping[str, Any]) -> Any:
    import regex

    pattern = regex.compile(arguments.get("tag_pattern", ""), regex.DOTALL)
    if "key" not in pattern.groupindex:
        raise ValueError("xml-inline: tag_pattern must have a group 'key'")
    return pattern


def _elements(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the elements of a text, by transformers' rules for ``xml-inline``."""
    found: dict[str, Any] = {}
    repeated: set[str] = set()
    for key, value in _found_elements(text, arguments):
        if key not in found or not arguments.get("merge_duplicates", False):
            found[key] = value
        elif key in repeated:
            found[key].append(value)
        else:
            repeated.add(key)
            found[key] = [found[key], value]
    return found


def _found_elements(text: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    from transformers.utils.chat_parsing.content_parsers import parse_content

    inner = arguments.get("value_parser")
    pattern = _elements_pattern(arguments)
    for match in pattern.finditer(text, timeout=ELEMENTS_TIMEOUT_S):
        groups = match.groupdict()
        value = groups.get("value", "")
        if inner is not None:
            value = parse_content(value, inner.get("name", "text"), inner.get("args", {}))
        yield groups["key"], value
