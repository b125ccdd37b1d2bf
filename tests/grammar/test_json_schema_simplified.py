"""Keywords that say nothing, and those that others express, mean what jsonschema says."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from json_documents import ExactValidator, accepts, compile_schema, random_document

from paged_backend.grammar.calls import write_calls
from paged_backend.grammar.json_schema import checked_schema
from paged_backend.grammar.writer import GrammarWriter
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.tool_choice import Tool, ToolChoice

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
MAP: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
ARRAY: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
PAIR: dict[str, Any] = {"type": "array", "prefixItems": [{"type": "integer"}] * 2}
KINDS = {"properties": {"a": {"const": 1}}}
SCHEMAS: list[dict[str, Any]] = [
    *(OBJECT | {"propertyNames": names} for names in (True, {}, {"type": "string"})),
    OBJECT | {"propertyNames": {"type": ["string", "null"], "minLength": 0, "title": "x"}},
    MAP | {"propertyNames": {"pattern": "^[ab]{1,2}$"}},
    MAP | {"propertyNames": {"type": "string", "minLength": 1, "maxLength": 2}},
    MAP | {"propertyNames": {"enum": ["a", "bb"]}},
    OBJECT | {"propertyNames": {"enum": ["a"]}},
    OBJECT | {"additionalProperties": True, "propertyNames": {"const": "a"}},
    OBJECT | {"propertyNames": {"enum": ["a", "c"]}, "additionalProperties": {"type": "string"}},
    *(OBJECT | {name: {}} for name in ("dependentRequired", "dependencies", "dependentSchemas")),
    OBJECT | {"dependentRequired": {"b": [], "a": ["b"]}},
    OBJECT | {"dependentRequired": {"c": ["b"], "b": ["a"]}},
    OBJECT | {"$schema": DRAFT_7, "dependencies": {"a": True, "b": []}},
    OBJECT | {"dependentSchemas": {"a": True, "b": {"description": "x"}}},
    OBJECT | {"patternProperties": {}, "allOf": [], "minProperties": 0, "not": False},
    OBJECT | {"unevaluatedProperties": True},
    OBJECT | {"unevaluatedProperties": False},
    {name: OBJECT[name] for name in ("type", "properties")} | {"unevaluatedProperties": False},
    OBJECT | {"not": {"not": {}}},
    OBJECT | {"not": {"not": {"required": ["b"]}}},
    OBJECT | {"if": KINDS},
    OBJECT | {"then": False, "else": False},
    OBJECT | {"if": KINDS, "then": True, "else": {}},
    OBJECT | {"if": True, "then": {"required": ["b"]}, "else": False},
    OBJECT | {"if": False, "then": False, "else": {"required": ["b"]}},
    OBJECT | {"contains": False, "uniqueItems": True, "minContains": 3},
    ARRAY | {"uniqueItems": False, "minItems": 0, "additionalItems": False},
    ARRAY | {"uniqueItems": True, "maxItems": 1},
    ARRAY | {"minContains": 2, "maxContains": 1},
    ARRAY | {"contains": {"const": 1}, "minContains": 0},
    ARRAY | {"contains": True},
    ARRAY | {"contains": {}, "minContains": 2, "maxContains": 2, "maxItems": 4},
    ARRAY | {"unevaluatedItems": False},
    PAIR | {"unevaluatedItems": False},
    PAIR | {"unevaluatedItems": True},
    {"type": "integer", "propertyNames": False, "contains": False, "not": {"not": True}},
    {"type": "integer", "format": "email", "contentEncoding": "base64", "readOnly": True},
    {"type": "string", "format": "password", "contentSchema": False, "deprecated": True},
    {"type": "string", "$dynamicAnchor": "x"},
    {"type": "string", "$schema": "https://json-schema.org/draft/2019-09/schema"}
    | {"$recursiveAnchor": False},
]
DOCUMENTS: list[Any] = [
    *({}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": "x"}, {"a": 1, "c": 1}, {"a": 1, "c": "x"}),
    *({"bb": 1}, {"abb": 1}, {"": 1}, {"a": 2, "bb": 1}),
    *([], [1], [2], [1, 1], [1, 2], [1, 2, 3], [1, "x"], ["x"]),
    *(1, "x", "", None, 1.5),
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_the_same_documents_as_those_of_jsonschema(schema: dict[str, Any]) -> None:
    matcher, validator = compile_schema(schema), ExactValidator(schema)
    for document in DOCUMENTS:
        is_valid = not validator.problem(json.dumps(document))
        assert accepts(matcher, document) == is_valid, document
    rng = random.Random(3)
    for text in (random_document(matcher, rng, 12) for _ in range(10)):
        assert text is None or not validator.problem(text), text


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        (OBJECT | {"propertyNames": {"maxLength": 1}}, "propertyNames"),
        (OBJECT | {"propertyNames": {"enum": ["b"]}}, "propertyNames"),
        (MAP | {"patternProperties": {"^a": {}}, "propertyNames": {"enum": ["b"]}}, "propertyN"),
        (OBJECT | {"dependentRequired": {"b": ["c"]}}, "dependentRequired"),
        (OBJECT | {"not": {}}, "not"),
        (OBJECT | {"if": KINDS, "then": {"required": ["b"]}}, "if"),
        (OBJECT | {"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        (ARRAY | {"uniqueItems": True}, "uniqueItems"),
        (ARRAY | {"contains": {"const": 1}}, "contains"),
        # In a draft without minContains, this asks for one.
        (ARRAY | {"$schema": DRAFT_7, "contains": {"const": 1}, "minContains": 0}, "contains"),
        # What a reference leads to stays where it is.
        ({"anyOf": [{"$ref": "#/propertyNames"}], "propertyNames": {"type": "string"}}, "property"),
        # Values of wrong types.
        (ARRAY | {"contains": True, "minItems": "x"}, "contains"),
        (OBJECT | {"dependentRequired": {"b": [{}]}}, "dependentRequired"),
    ],
)
def test_what_says_something_is_still_refused_by_name(schema: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        compile_schema(schema)


def test_the_client_s_schema_stays_as_it_is() -> None:
    schema = OBJECT | {"propertyNames": {"type": "string"}}
    before = json.dumps(schema)
    checked_schema(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("parser", ["pythonic", "gemma4", "qwen3_coder"])
def test_arguments_of_tools_in_other_notations(parser: str) -> None:
    parameters = json.dumps(OBJECT | {"propertyNames": {"type": "string"}, "minProperties": 0})
    choice = ToolChoice((Tool("f", parameters, strict=True),), required=True)
    write_calls(GrammarWriter({}), OutputConstraint(tool_choice=choice, tool_parser=parser), None)
