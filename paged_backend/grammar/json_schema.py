"""Checks and changes a JSON schema before llguidance compiles it.

llguidance refuses the keywords that it does not know how to enforce, except those below, which it
would ignore.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

# Optional whitespace: enough for indented JSON, but without the endless line breaks into which
# models fall.
JSON_WHITESPACE = r"[ \t]{0,2}(\r?\n[ \t]{0,40})?"
MAX_DEPTH = 128  # of the schema
MAX_COUNT = 2**24  # of items or characters; no output is as long
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Keywords of old drafts, by what replaced them.
_OBSOLETE = {"divisibleBy": "multipleOf", "extends": "allOf", "disallow": "not"}
_OF_NUMBERS = ("exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum", "multipleOf")
# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_SCHEMA = ("items", "additionalItems", "additionalProperties")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message names the keyword."""


def parse_schema(text: str) -> Any:
    """Return the JSON value in ``text``.

    Raises:
        SchemaError: it is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise SchemaError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise SchemaError(f"is not valid JSON: {error}") from None


def checked_schema(schema: Any, *, disable_additional_properties: bool = False) -> dict[str, Any]:
    """Return a copy of the schema whose keywords llguidance enforces or refuses.

    Args:
        schema: a JSON value.
        disable_additional_properties: forbid properties that the schema does not name, in each
            object schema that does not say whether it allows them.

    Raises:
        SchemaError: it is not a JSON schema, or a keyword would not be enforced.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("must be a JSON object; false allows no output")
    for part, depth in _schemas(schema):
        if depth > MAX_DEPTH:
            raise SchemaError(f"is nested deeper than {MAX_DEPTH} levels")
        _check(part)
    result: dict[str, Any] = copy.deepcopy(schema)
    for part, _ in _schemas(result):
        part.pop("x-guidance", None)  # options of llguidance, some of which weaken the schema
        if disable_additional_properties and _describes_object(part):
            part.setdefault("additionalProperties", False)
    return result


def _schemas(schema: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the schema and all schemas in it, without recursion, with their depth."""
    waiting = [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part, depth
        inner = [part[name] for name in _SCHEMA if isinstance(part.get(name), dict)]
        for name in _SCHEMAS:
            inner += part[name] if isinstance(part.get(name), list) else []
        for name in _NAMED_SCHEMAS:
            inner += part[name].values() if isinstance(part.get(name), dict) else []
        waiting += [(item, depth + 1) for item in inner]


def _check(schema: Mapping[str, Any]) -> None:
    for name, replacement in _OBSOLETE.items():
        if name in schema:
            raise SchemaError(f"the keyword {name} is not supported; use {replacement}")
    for name in _COUNTS:
        value = schema.get(name, 0)
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0
        if not whole or not 0 <= value <= MAX_COUNT:
            raise SchemaError(f"the keyword {name} must be an integer from 0 to {MAX_COUNT}")
    for name in _OF_NUMBERS:
        value = schema.get(name, 0)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise SchemaError(f"the keyword {name} must be a number")


def _describes_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object" or "properties" in schema
