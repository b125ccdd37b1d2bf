"""What llguidance would weaken silently is enforced or refused by name."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from typing import Any

import pytest
from json_documents import (
    ExactValidator,
    accepts_text,
    compile_params,
    compile_schema,
    random_document,
)

from paged_backend.values.structured_outputs import StructuredOutputsParams

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_6 = "http://json-schema.org/draft-06/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        # Keywords that the draft of the schema does not have.
        ({"$schema": DRAFT_6, "if": {}, "then": {"type": "string"}}, "if"),
        ({"$schema": DRAFT_7, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"$schema": DRAFT_7, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
        ({"$schema": DRAFT_7, "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"$schema": DRAFT_7, "unevaluatedItems": False}, "unevaluatedItems"),
        ({"$schema": DRAFT_4, "contains": {"type": "string"}}, "contains"),
        ({"$schema": DRAFT_4, "propertyNames": {"maxLength": 1}}, "propertyNames"),
        ({"$schema": DRAFT_7, "$dynamicRef": "#"}, "$dynamicRef"),
        ({"$schema": DRAFT_7, "$recursiveRef": "#"}, "$recursiveRef"),
        ({"$schema": DRAFT_2019, "prefixItems": [{"type": "string"}]}, "prefixItems"),
        ({"prefixItems": [{"type": "string"}], "additionalItems": False}, "prefixItems"),
        # Schemas that only a reference leads to.
        ({"$ref": "#/parts/a", "parts": {"a": {"divisibleBy": 2}}}, "divisibleBy"),
        ({"$ref": "#/parts/a", "parts": {"a": {"$schema": DRAFT_6, "not": {"const": 1}}}}, "not"),
        ({"$ref": "#/a~1b/0", "a/b": [{"$schema": DRAFT_4, "contains": {}}]}, "contains"),
        ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "divisibleBy": 2}}}, "divisibleBy"),
        (
            {
                "$ref": "#/parts/a",
                "parts": {"a": {"$ref": "#x"}},
                "$defs": {"x": {"$anchor": "x", "divisibleBy": 2}},
            },
            "divisibleBy",
        ),
        (
            {
                "$ref": "#/parts/a",
                "parts": {"a": {"$id": "http://a/", "$ref": "#/b", "b": {"divisibleBy": 2}}},
            },
            "divisibleBy",
        ),
        ({"$ref": DRAFT_7}, "$ref"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "$ref"),
        # Documents without end.
        ({"$ref": "#"}, "$ref"),
        (NODE | {"required": ["next"]}, "$ref"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$ref"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "$ref"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}, "$ref"),
        # Properties that llguidance would count twice.
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties"),
        # Numbers that change when they are read.
        ({"const": 2**53 + 1}, "const"),
        ({"enum": [1, {"a": [2**64 - 1]}]}, "enum"),
        ({"type": "integer", "minimum": 10**19}, "minimum"),
        ({"type": "number", "maximum": 2**62}, "maximum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf"),
        ({"allOf": [{"multipleOf": 1e-8}, {"multipleOf": 64}]}, "multipleOf"),
        ({"exclusiveMinimum": 5, "maximum": 5.5}, "exclusiveMinimum"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"exclusiveMaximum": 0.5}]}, "exclusiveMinimum"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "exclusiveMaximum"),
        # Formats of which llguidance checks nothing.
        ({"type": "string", "format": "unknown"}, "unknown"),
        ({"type": "number", "format": "percent"}, "percent"),
        # What llguidance does not support.
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "oneOf"),
        ({"properties": {"a": {}}, "maxProperties": 3}, "maxProperties"),
        ({"type": "integer", "minimum": -(2**63)}, "minimum"),
        # Characters that llguidance would leave out.
        ({"const": "a\x01b"}, "const"),
        ({"enum": [{"a": "\x7f"}]}, "enum"),
        ({"type": "string", "pattern": "^a\x01b$"}, "pattern"),
        ({"type": "string", "pattern": r"^a[\x01]b$"}, "pattern"),
        ({"type": "string", "pattern": r"^a\u{7f}b$"}, "pattern"),
        ({"type": "string", "pattern": r"^a\v?b$"}, "pattern"),
        # Patterns that mean something else in Rust.
        ({"type": "string", "pattern": r"^\Aa$"}, "pattern"),
        ({"type": "string", "pattern": "^[+--]$"}, "pattern"),
        ({"patternProperties": {r"\a": {}}}, "patternProperties"),
    ],
)
def test_refused_by_name(schema, name):
    with pytest.raises(ValueError, match=rf"\b{name}\b" if name[0].isalpha() else rf"\{name}\b"):
        compile_schema(schema)


DATE, TIME = {"type": "string", "format": "date"}, {"type": "string", "format": "time"}
DATE_TIME = {"type": "string", "format": "date-time"}
HOST = {"type": "string", "format": "hostname"}
LONG = ".".join(["a" * 63] * 3)
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
PATTERNED = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}


def matching(pattern: str) -> dict[str, str]:
    return {"type": "string", "pattern": pattern}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # Schemas that refer to themselves.
        (NODE, '{"next":{"next":{}}}', '{"next":1}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]", "[1]"),
        (
            {
                "type": "object",
                "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
                "required": ["a"],
                "additionalProperties": False,
            },
            '{"a":{"a":null}}',
            '{"a":{}}',
        ),
        ({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "null"}}}, "null", "1"),
        # A property that is spelled with an escape.
        (OPEN, '{"a":1,"b":"x"}', r'{"\u0061":"x"}'),
        (PATTERNED, '{"ab":1,"b":"x"}', r'{"\u0061b":"x"}'),
        # Keywords that belong together, with another one between them.
        (
            {"items": [{"type": "string"}], "allOf": [{}], "additionalItems": False},
            '["a"]',
            '["a",1]',
        ),
        ({"type": "integer", "format": "int32"}, "2147483647", "2147483648"),
        ({"type": ["integer", "null"], "format": "uint8"}, "255", "256"),
        ({"type": "integer", "format": "int64"}, str(2**63 - 1), str(2**63)),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 1.5}, "1", "0"),
        (DATE, '"2024-02-29"', '"2023-02-29"'),
        (DATE, '"2000-02-29"', '"1900-02-29"'),
        (DATE | {"pattern": "^2"}, '"2024-12-31"', '"1999-12-31"'),
        (TIME, '"23:59:59.5+05:30"', '"22:59:60Z"'),
        (DATE_TIME, '"2024-02-29T00:00:00Z"', '"2023-02-29T00:00:00Z"'),
        (HOST, f'"{LONG}.{"a" * 61}"', f'"{LONG}.{"a" * 62}"'),
        (HOST | {"maxLength": 5}, '"a-b.c"', '"a-b.cd"'),
        (HOST, '"a--b.ab-c-d"', '"xn--x"'),
        (matching("^[[a]$"), '"["', '"x"'),
        (matching("^[[:alpha:]]$"), '":]"', '"x"'),
        (matching("^[a-z&&[^b]]$"), '"&]"', '"a"'),
        (matching("^[ab~~b]$"), '"b"', '"c"'),
        (matching(r"^\S$"), '"a"', '"\ufeff"'),
        (matching(r"^[^\s]$"), '"a"', '"\ufeff"'),
        (matching(r"^\s$"), '"\ufeff"', '"\x85"'),
        (matching("^.$"), '"a"', '"\u2028"'),
        (matching(r"^[.\]]$"), '"]"', '"a"'),
        (matching(r"^[\x00-\x1f]$"), r'"\n"', '"a"'),
    ],
)
def test_enforced(schema, valid, invalid):
    matcher = compile_schema(schema)
    assert accepts_text(matcher, valid)
    assert not accepts_text(matcher, invalid)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": False},
        {"type": "array", "maxItems": 2.0},
        {"type": "object", "minProperties": 2, "required": ["a"]},
        {"type": "string", "$defs": {"unused": {"not": {}}}},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {}}},
        {"const": {"not": {}, "uniqueItems": True}},
        {"type": "array", "format": "table"},
        {"type": "number", "format": "double"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"allOf": [{"multipleOf": 6}, {"multipleOf": 0.25}]},
    ],
)
def test_served(schema):
    compile_schema(schema)


def random_number(rng: random.Random) -> float:
    return round(rng.uniform(-12, 12), rng.choice((0, 0, 1, 2)))


def random_number_schema(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(("number", "integer"))}
    for low, high in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
        ends = sorted((random_number(rng), random_number(rng)))
        for name, end in zip((low, high), ends, strict=True):
            if rng.random() < 0.4:
                schema[name] = end
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice((0.01, 0.1, 0.25, 0.5, 1, 1.5, 3, 7))
    return schema


def test_random_ranges_of_numbers():
    """At and around their ends, too."""
    rng, num_checked = random.Random(2), 0
    for _ in range(300):
        schema = random_number_schema(rng)
        try:
            matcher = compile_schema(schema)
        except ValueError:
            continue
        validator = ExactValidator(schema)
        texts = [random_document(matcher, rng, 12) for _ in range(3)]
        for end in {value for name, value in schema.items() if name != "type"}:
            steps = [Fraction(step, 100) for step in (-100, -10, -1, 0, 1, 10, 100)]
            near = [json.dumps(float(Fraction(str(end)) + step)) for step in steps]
            texts += near + [text.removesuffix(".0") for text in near] + ["-0"]
        for text in texts:
            if text is not None and accepts_text(matcher, text):
                num_checked += 1
                assert not validator.problem(text), (schema, text)
    assert num_checked > 1000


def test_structural_tags_enforce_their_schemas():
    content = {"type": "json_schema", "json_schema": OPEN}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    params = StructuredOutputsParams(structural_tag={"format": tag})
    matcher = compile_params(params)
    assert accepts_text(matcher, '<a>{"a":1,"b":"x"}</a>')
    assert not accepts_text(matcher, r'<a>{"\u0061":"x"}</a>')
