"""Checks and changes a JSON schema before llguidance compiles it.

llguidance refuses or enforces most keywords. What it would ignore, or would not enforce as the
specification says, is refused here or rewritten into what it does enforce.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paged_backend.grammar.schema_numbers import INTEGER_FORMATS, check_numbers
from paged_backend.grammar.schema_recursion import check_recursion
from paged_backend.grammar.schema_simplify import simplified
from paged_backend.grammar.schema_strings import check_constants, rewrite_strings
from paged_backend.grammar.schema_walk import MAX_DEPTH, SchemaError, subschemas, types_of

if TYPE_CHECKING:  # a type that only the stub file has
    from llguidance._lib import JsonCompileOptions

# JSON on one line, with or without a space after a colon or a comma: models fall into endless line
# breaks where white space is free, and each of its tokens costs a step. Separators are patterns.
JSON_ON_ONE_LINE: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
# Options of llguidance. The first two would weaken schemas, which can ask for them themselves under
# "x-guidance". Without \u among the escapes, each name of a property can be written in one way
# only; with it, "\u0061" would be an additional property next to a property "a".
STRICT_OPTIONS: JsonCompileOptions = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
MAX_COUNT = 2**24  # number of items or characters; no output is as long
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Keywords of old drafts, by what replaced them.
_OBSOLETE = {"divisibleBy": "multipleOf", "extends": "allOf", "disallow": "not"}
# llguidance refuses these only in schemas of the drafts that define them.
_UNSUPPORTED = (
    *("if", "then", "else", "not", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
_METASCHEMAS = "//json-schema.org/"
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "2019-09")
_NUMBERS = {"integer", "number"}
_FORMATS_OF_ANY_NUMBER = ("float", "double")


def parse_schema(text: str) -> Any:
    """Return the JSON value in ``text``.

    Raises:
        SchemaError: it is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise SchemaError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise SchemaError(f"is not valid JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def checked_schema(schema: Any, *, disable_additional_properties: bool = False) -> dict[str, Any]:
    """Return a copy of the schema with keywords that llguidance enforces or refuses.

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
    result: dict[str, Any] = simplified(schema)
    parts = subschemas(result)
    for part in parts:
        _check(part)
    _check_draft(parts)
    check_numbers(parts)
    check_recursion(result, parts)
    for part in parts:
        _rewrite(part)
        rewrite_strings(part)
        if disable_additional_properties and _describes_object(part):
            part.setdefault("additionalProperties", False)
    return result


def _check(schema: Mapping[str, Any]) -> None:
    for name, replacement in _OBSOLETE.items():
        if name in schema:
            raise SchemaError(f"the keyword {name} is not supported; use {replacement}")
    for name in _UNSUPPORTED:
        if name in schema:
            raise SchemaError(f"the keyword {name} is not supported")
    if _METASCHEMAS in str(schema.get("$ref")):  # llguidance has them, but has them unchecked
        raise SchemaError(f"the keyword $ref cannot lead to a schema of {_METASCHEMAS}")
    for name in _COUNTS:
        value = schema.get(name, 0)
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value % 1 == 0
        if not whole or not 0 <= value <= MAX_COUNT:
            raise SchemaError(f"the keyword {name} must be an integer from 0 to {MAX_COUNT}")
    _check_min_properties(schema)
    _check_number_format(schema)
    check_constants(schema)


def _check_min_properties(schema: Mapping[str, Any]) -> None:
    """Refuse what llguidance would meet with the same property twice."""
    required = schema.get("required")
    limit = 1 + (len(required) if isinstance(required, list) else 0)
    if schema.get("minProperties", 0) > limit:
        raise SchemaError(f"the keyword minProperties must be at most {limit} here")


def _check_number_format(schema: Mapping[str, Any]) -> None:
    """Refuse a format of numbers that is not known; llguidance looks at formats of strings only."""
    name, types = schema.get("format"), types_of(schema)
    known = name in INTEGER_FORMATS or name in _FORMATS_OF_ANY_NUMBER
    if isinstance(name, str) and not known and "string" not in types and types & _NUMBERS:
        raise SchemaError(f"the format {name} is not supported")


def _check_draft(schemas: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ``prefixItems`` where llguidance would follow a draft that did not have it."""
    drafts = [str(schema["$schema"]) for schema in schemas if "$schema" in schema]
    is_old = any(name in draft for draft in drafts for name in _OLD_DRAFTS)
    for schema in schemas:
        older = is_old or "additionalItems" in schema or isinstance(schema.get("items"), list)
        if "prefixItems" in schema and older:
            raise SchemaError("the keyword prefixItems is not supported in schemas of old drafts")


def _rewrite(schema: dict[str, Any]) -> None:
    """Change a schema in place into one that means the same and that llguidance enforces."""
    schema.pop("x-guidance", None)  # options of llguidance, some of which weaken the schema
    for name in _COUNTS:
        if name in schema:
            schema[name] = int(schema[name])
    if "additionalItems" in schema and "items" in schema:  # ignored if they are apart
        for name in ("items", "additionalItems"):
            schema[name] = schema.pop(name)
    if schema.get("format") in INTEGER_FORMATS and "string" not in types_of(schema):
        smallest, largest = INTEGER_FORMATS[schema["format"]]
        bounds = {"minimum": smallest, "maximum": largest}
        schema["allOf"] = [*schema.get("allOf", []), bounds]


def _describes_object(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "object" or "properties" in schema
