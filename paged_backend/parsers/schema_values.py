"""Values of parameters that a model writes as text, by the schemas of the tools.

The rules are those of transformers' ``ResponseParser``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


class ParameterTypes:
    """The types of the parameters of tools.

    Args:
        tools: in OpenAI's JSON.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = (tool.get("function", tool) for tool in tools)
        self._properties = {
            function.get("name"): _properties(function.get("parameters")) for function in functions
        }
        self._types: dict[tuple[str, str], list[str]] = {}  # of parameters that were written

    def has(self, tool: str) -> bool:
        """Return True if there is a tool of this name."""
        return tool in self._properties

    def of(self, tool: str, parameter: str) -> list[str]:
        """Return the types of a parameter in the order of preference; empty if there are none."""
        schema = self._properties.get(tool, {}).get(parameter)
        if schema is None:
            return []
        key = (tool, parameter)
        if key not in self._types:
            self._types[key] = types_of(schema)
        return self._types[key]


def _properties(parameters: Any) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: Any) -> list[str]:
    """Return the types that a schema of a parameter allows, in the order of preference."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [item for item in declared if isinstance(item, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += types_of(choice)
    if schema.get("nullable") and "null" not in types:
        types.append("null")
    return types


def as_json(text: str, types: Sequence[str]) -> str:
    """Return the JSON of a value that is written as text: a string unless it has another type."""
    for type_name in types:
        try:
            value = _READ[type_name](text)
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return int(number) if number.is_integer() and "." not in text else number


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _null(text: str) -> None:
    return {"null": None, "None": None}[text.strip()]


def _object(text: str) -> Any:
    return _of_kind(text, dict)


def _array(text: str) -> Any:
    return _of_kind(text, list)


def _of_kind(text: str, kind: type) -> Any:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError
    return value


_READ = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _object,
    "array": _array,
}
