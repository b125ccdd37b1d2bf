"""Finds JSON schemas that no document can satisfy, because each one would contain another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.grammar.schema_walk import SchemaError, follow


def check_recursion(schema: dict[str, Any], parts: Sequence[dict[str, Any]]) -> None:
    """Refuse a schema if all of its documents would be infinite.

    Args:
        schema: the whole schema.
        parts: the schema and all schemas in it.

    Raises:
        SchemaError: every document contains another document of the same schema.
    """
    if any("$id" in part or "id" in part for part in parts if part is not schema):
        return  # references lead to other places there
    finite: set[int] = set()  # schemas that have a finite document, by id
    unknown = list(reversed(parts))  # most schemas come after those that use them
    num_unknown = len(unknown) + 1
    while len(unknown) < num_unknown:
        num_unknown = len(unknown)
        for part in unknown:
            if _is_finite(part, schema, finite):
                finite.add(id(part))
        unknown = [part for part in unknown if id(part) not in finite]
    if id(schema) not in finite:
        raise SchemaError("the keyword $ref leads to documents without end")


def _is_finite(part: Mapping[str, Any], schema: dict[str, Any], finite: set[int]) -> bool:
    """Return True if the schema has a finite document, as far as the other schemas are known."""

    def known(value: Any) -> bool:
        return not isinstance(value, dict) or id(value) in finite

    if "enum" in part or "const" in part:
        return True
    reference = str(part.get("$ref", ""))
    if (reference == "#" or reference.startswith("#/")) and not known(follow(schema, reference)):
        return False
    alternatives = [part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)]
    return (
        all(any(map(known, choices)) for choices in alternatives if choices)
        and all(map(known, _list(part, "allOf")))
        and all(map(known, _needed(part)))
    )


def _needed(part: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the parts that each object or array must have."""
    if part.get("type") == "object" and isinstance(part.get("properties"), dict):
        return [part["properties"].get(str(name)) for name in _list(part, "required")]
    if part.get("type") == "array":
        count = part.get("minItems", 0)
        first = _list(part, "prefixItems")
        rest = [part.get("items")] if count > len(first) else []
        return [*first[: int(count)], *rest]
    return []


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []
