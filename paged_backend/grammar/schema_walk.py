"""Finds the schemas in a JSON schema that its documents depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 128  # levels of the schema
# Keywords that hold a schema, a list of schemas, or an object of schemas.
_SCHEMA = ("items", "additionalItems", "additionalProperties")
_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED_SCHEMAS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")  # only matter if a $ref leads to them


_ALL_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message names the keyword."""


def subschemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schema and all schemas in it that it uses, wherever a ``$ref`` finds them.

    Raises:
        SchemaError: the schema is nested too deeply.
    """
    found: dict[int, dict[str, Any]] = {}
    roots, references = [schema], {"#": None}  # a set in the order of the schema
    _visit(schema, found)
    num_before = 0
    while len(found) > num_before:
        new = list(found.values())[num_before:]
        num_before = len(found)
        new_roots = [part for part in new if "$id" in part or "id" in part]
        named = dict.fromkeys(str(part["$ref"]) for part in new if "$ref" in part)
        new_references = {name: None for name in named if name not in references}
        targets = [
            *(follow(root, name) for root in new_roots for name in references),
            *(follow(root, name) for root in [*roots, *new_roots] for name in new_references),
        ]
        roots += new_roots
        references |= new_references
        if any(
            "#/" not in name for name in references if name != "#"
        ):  # may lead to any definition
            parts = list(found.values())
            targets += [
                value for name in _DEFINITIONS for part in parts for value in _values(part, name)
            ]
        for target in targets:
            _visit(target, found)
    return list(found.values())


def _visit(schema: Any, found: dict[int, dict[str, Any]]) -> None:
    """Add the schema and all schemas in it to those found so far, without recursion."""
    waiting = [(schema, 0)]
    while waiting:
        part, depth = waiting.pop()
        if not isinstance(part, dict) or id(part) in found:
            continue
        if depth > MAX_DEPTH:
            raise SchemaError(f"is nested deeper than {MAX_DEPTH} levels")
        found[id(part)] = part
        waiting += [(inner, depth + 1) for inner in _inner(part)]


def _inner(part: dict[str, Any]) -> Iterator[Any]:
    for name in _SCHEMA:
        yield part.get(name)
    for name in _SCHEMAS:
        yield from part[name] if isinstance(part.get(name), list) else ()
    for name in _NAMED_SCHEMAS:
        yield from _values(part, name)


def _values(part: dict[str, Any], name: str) -> list[Any]:
    return list(part[name].values()) if isinstance(part.get(name), dict) else []


def follow(value: Any, reference: str) -> Any:
    """Return what the JSON pointer of a reference leads to, None if nothing."""
    _, _, pointer = reference.partition("#/")
    if not pointer:
        return value
    for step in unquote(pointer).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names; all if it names none."""
    types = schema.get("type", _ALL_TYPES)
    return {types} if isinstance(types, str) else {str(name) for name in types}


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in arrays and objects, without recursion."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
        else:
            yield item
