"""Removes keywords that say nothing from a JSON schema, and expresses others by simpler ones.

llguidance refuses keywords that it cannot enforce even where their values allow everything.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paged_backend.grammar.schema_walk import SchemaError, subschemas, types_of

Schema = dict[str, Any]

# Keywords that allow and forbid nothing.
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "$comment"),
        *("deprecated", "readOnly", "writeOnly"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
_OF_OBJECTS = (
    *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
    "unevaluatedProperties",
)
_OF_ARRAYS = ("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems")
_LEAST = ("minItems", "minLength", "minProperties")
_CONDITION = ("if", "then", "else")
# With these keywords in a schema, "unevaluated" depends on what other schemas evaluate.
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies")
_EMPTY: Schema = {"patternProperties": {}, "allOf": []}
# Formats of strings, which say nothing about other values, and those that any string has.
_STRING_FORMATS = frozenset(
    (
        *("date", "time", "date-time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
_ANY_STRING = frozenset(("password", "binary", "path", "file-path", "directory-path"))


def simplify(parts: Iterable[Schema]) -> None:
    """Change these schemas in place; each of them allows the same values as before.

    Args:
        parts: a schema and all schemas in it.
    """
    parts = list(parts)
    # What a reference leads to is left where it is.
    references = {
        step for part in parts for step in re.split("[#/]", str(part.get("$ref", ""))) if step
    }
    is_new = not any("/draft-0" in str(part.get("$schema")) for part in parts)
    for part in reversed(parts):  # the inner ones first
        own = {name for name in part if name in references}
        if not own & {*_OF_OBJECTS, *_OF_ARRAYS, *_CONDITION, "not"}:
            _drop(part)
            if is_new and _is_sound(part):
                _translate(part)
        for name in ("$dynamicAnchor", "$recursiveAnchor"):
            if part.get(name) is False or str(part.get(name)) not in references:
                part.pop(name, None)


def simplified(schema: Any) -> Any:
    """Return a copy of a schema that allows the same values.

    Raises:
        SchemaError: the schema is nested too deeply, or allows no value.
    """
    if not isinstance(schema, dict):
        return schema
    subschemas(schema)  # checks its depth before it is copied
    result = copy.deepcopy(schema)
    simplify(subschemas(result))
    return result


def allows_all(schema: Any) -> bool:
    """Return True if a schema certainly allows every value."""
    return schema is True or (isinstance(schema, Mapping) and schema.keys() <= ANNOTATIONS)


def _allows_none(schema: Any) -> bool:
    is_object = isinstance(schema, Mapping) and "not" in schema
    return schema is False or (is_object and allows_all(schema["not"]))


def _is_sound(part: Schema) -> bool:
    """Return True if the keywords that are combined here have values of their types."""

    def fits(name: str, kind: type) -> bool:
        return isinstance(part.get(name, kind()), kind)

    return (
        all(fits(name, int) for name in ("minItems", "maxItems", "minContains", "maxContains"))
        and all(fits(name, dict) for name in ("properties", "patternProperties"))
        and all(fits(name, list) for name in ("allOf", "required"))
        and all(isinstance(name, str) for name in part.get("required", []))
    )


def _drop(part: Schema) -> None:
    """Remove keywords that say nothing, by any draft."""
    types = types_of(part)
    unused = [
        *(_OF_OBJECTS if "object" not in types else ()),
        *(_OF_ARRAYS if "array" not in types else ()),
        *(name for name in _LEAST if type(part.get(name)) in (int, float) and part[name] == 0),
        *(name for name, value in _EMPTY.items() if part.get(name) == value),
        *(name for name, says_nothing in _NOTHING.items() if says_nothing(part)),
    ]
    for name in unused:
        part.pop(name, None)
    branches = [part.get(name, True) for name in ("then", "else")]
    if "if" not in part or all(map(allows_all, branches)):
        for name in _CONDITION:
            part.pop(name, None)
    name = part.get("format")
    if name in _ANY_STRING or (name in _STRING_FORMATS and "string" not in types):
        del part["format"]


def _translate(part: Schema) -> None:
    """Express keywords of the present draft by others."""
    if "if" in part and (allows_all(part["if"]) or _allows_none(part["if"])):
        kept = part.get("then" if allows_all(part["if"]) else "else", True)
        part["allOf"] = [*part.get("allOf", []), kept]
        for name in _CONDITION:
            part.pop(name, None)
    negated = part.get("not")
    if isinstance(negated, dict) and negated.keys() == {"not"}:
        part["allOf"] = [*part.get("allOf", []), part.pop("not")["not"]]
    if part.get("minContains") == 0 and "maxContains" not in part:
        del part["minContains"]
        part.pop("contains", None)
    if "contains" in part and allows_all(part["contains"]):
        del part["contains"]
        least = max(part.get("minItems", 0), part.pop("minContains", 1))
        most = [part[name] for name in ("maxItems", "maxContains") if name in part]
        part.pop("maxContains", None)
        part |= {"minItems": least} | ({"maxItems": min(most)} if most else {})
    _translate_dependencies(part)
    _translate_unevaluated(part)
    if "propertyNames" in part:
        _translate_names(part)


def _translate_dependencies(part: Schema) -> None:
    """Remove dependencies of properties that are always there, or never."""
    for keyword in ("dependentRequired", "dependencies"):
        needed = part.get(keyword)
        if not isinstance(needed, dict) or not all(map(_is_names, needed.values())):
            continue
        required = dict.fromkeys(part.get("required", []))
        while due := [name for name in required if name in needed]:
            required |= dict.fromkeys(needed.pop(due[0]))
        if required:
            part["required"] = list(required)
        if part.get("additionalProperties") is False and not part.get("patternProperties"):
            for name in needed.keys() - part.get("properties", {}).keys():
                del needed[name]
        if all(set(names) <= required.keys() for names in needed.values()):
            del part[keyword]


def _translate_unevaluated(part: Schema) -> None:
    if any(name in part for name in _IN_PLACE):
        return
    if "unevaluatedProperties" in part:
        part.setdefault("additionalProperties", part.pop("unevaluatedProperties"))
    if "unevaluatedItems" in part and "contains" not in part:
        rest = part.pop("unevaluatedItems")
        if not isinstance(part.get("items"), list):
            part.setdefault("items", rest)
        else:
            part.setdefault("additionalItems", rest)


def _translate_names(part: Schema) -> None:
    """Express ``propertyNames`` by the properties that it allows."""
    names = part["propertyNames"]
    if not isinstance(names, dict) or "patternProperties" in part:
        return
    told = {name: value for name, value in names.items() if name not in ANNOTATIONS}
    if "string" in types_of(told):
        told.pop("type", None)
    rest = part.get("additionalProperties", True)
    properties = part.get("properties", {})
    listed = [told["const"]] if "const" in told else told.get("enum")
    if isinstance(listed, list) and len(told) == 1:
        allowed = [name for name in listed if isinstance(name, str)]
        if set(part.get("required", [])) - set(allowed):
            raise SchemaError("the keyword propertyNames forbids a required property")
        kept = {name: value for name, value in properties.items() if name in allowed}
        more = {} if rest is False else {name: rest for name in allowed if name not in kept}
        part["properties"] = kept | more
    elif (pattern := _pattern_of(told)) and not properties and not part.get("required"):
        part["patternProperties"] = {pattern: rest}
    else:
        return
    part["additionalProperties"] = False
    del part["propertyNames"]


def _pattern_of(names: Schema) -> str:
    """Return a pattern for what a schema of strings allows; empty if there is none."""
    if names.keys() == {"pattern"}:
        return str(names["pattern"])
    if names.keys() <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        if isinstance(least, int) and (most == "" or isinstance(most, int)):
            return rf"^[\s\S]{{{least},{most}}}$"
    return ""


def _allows_all_names(schema: Any) -> bool:
    """Return True if a schema certainly allows every string."""
    if not isinstance(schema, Mapping):
        return schema is True
    told = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
    return (
        told.keys() <= {"type", "minLength", "pattern"}
        and "string" in types_of(told)
        and told.get("minLength", 0) == 0
        and told.get("pattern", "") == ""
    )


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _says_nothing_of_dependencies(part: Schema, keyword: str) -> bool:
    needed = part.get(keyword)
    return isinstance(needed, dict) and all(
        value == [] if isinstance(value, list) else allows_all(value) for value in needed.values()
    )


# Tests whether a keyword of a schema says nothing.
_NOTHING: dict[str, Callable[[Schema], bool]] = {
    "propertyNames": lambda part: _allows_all_names(part.get("propertyNames")),
    "dependencies": lambda part: _says_nothing_of_dependencies(part, "dependencies"),
    "dependentRequired": lambda part: _says_nothing_of_dependencies(part, "dependentRequired"),
    "dependentSchemas": lambda part: _says_nothing_of_dependencies(part, "dependentSchemas"),
    "unevaluatedProperties": lambda part: allows_all(part.get("unevaluatedProperties")),
    "unevaluatedItems": lambda part: allows_all(part.get("unevaluatedItems")),
    "uniqueItems": lambda part: part.get("uniqueItems") is False or part.get("maxItems") in (0, 1),
    "minContains": lambda part: "contains" not in part,
    "maxContains": lambda part: "contains" not in part,
    "not": lambda part: _allows_none(part.get("not", True)),
}
