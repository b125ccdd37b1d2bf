"""Values of parameters that a model writes as text, by the schemas of the tools.

The rules are the same as in transformers' ``ResponseParser``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

# Subschemas of a parameter, and values that each lists, that are looked at for its types.
MAX_SCHEMA_PARTS = 256


class ParameterTypes:
    """The types of the parameters of tools.

    Args:
        tools: tools in OpenAI's JSON.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = (tool.get("function", tool) for tool in tools)
        self._schemas = {function.get("name"): function.get("parameters") for function in functions}
        self._types: dict[tuple[str, str], list[str]] = {}  # types of parameters that were written

    def has(self, tool: str) -> bool:
        """Return True if there is a tool of this name."""
        return tool in self._schemas

    def of(self, tool: str, parameter: str) -> list[str]:
        """Return the types of a parameter in the order of preference; empty if there are none."""
        root = self._schemas.get(tool)
        schema = _properties(root).get(parameter)
        if schema is None:
            return []
        key = (tool, parameter)
        if key not in self._types:
            self._types[key] = types_of(schema, root)
        return self._types[key]


def _properties(parameters: Any) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def types_of(schema: Any, root: Any = None) -> list[str]:
    """Return the types that a schema of a parameter allows, in the order of preference.

    A schema without ``type`` has the types of the values that it lists, or of what its keywords are
    about. No more than ``MAX_SCHEMA_PARTS`` parts of it are looked at.

    Args:
        schema: schema of the parameter.
        root: the schema of all parameters, to which references refer.
    """
    types: dict[str, None] = {}
    seen: set[str] = set()  # references; they may form a circle
    parts = [schema]
    num_parts = 0
    while parts and num_parts < MAX_SCHEMA_PARTS:
        part = parts.pop()
        num_parts += 1
        if not isinstance(part, Mapping):
            continue
        types |= dict.fromkeys(_own_types(part))
        choices = [
            choice
            for union in ("allOf", "anyOf", "oneOf")
            if isinstance(part.get(union), list)
            for choice in part[union][:MAX_SCHEMA_PARTS]
        ]
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            choices.append(_resolved(reference, root))
        parts += reversed(choices)
    return [name for name in types if name in _READ or name == "string"]


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema has without those within it."""
    declared = schema.get("type")
    if isinstance(declared, str):
        types = [declared]
    elif isinstance(declared, list):
        types = [item for item in declared[:MAX_SCHEMA_PARTS] if isinstance(item, str)]
    else:
        values = schema.get("enum")
        values = values[:MAX_SCHEMA_PARTS] if isinstance(values, list) else []
        values = values if "const" not in schema else [schema["const"]]
        types = [_NAMES[type(value)] for value in values if type(value) in _NAMES]
        types = types or [name for key, name in _TYPE_OF_KEYWORD.items() if key in schema]
    return [*types, "null"] if schema.get("nullable") else types


def _resolved(reference: str, root: Any) -> Any:
    """Return what a local reference refers to; None if it refers to nothing."""
    if not reference.startswith("#"):
        return None
    found = root
    for step in unquote(reference[1:]).split("/")[1:MAX_SCHEMA_PARTS]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


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

_NAMES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
    str: "string",
}
_TYPE_OF_KEYWORD = {
    "properties": "object",
    "additionalProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
