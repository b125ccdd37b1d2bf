"""The forms in which clients write a constraint, and their mistakes."""

from __future__ import annotations

import json

import pytest
from constraint_forms import forms_of

from paged_backend import LLM, SamplingParams
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.structured_outputs import StructuredOutputsParams, from_guide

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        *((form, {"json": TEXT}) for form in forms_of(SCHEMA).values()),
        ({"structured_outputs": json.dumps({"choice": ["a", "b"]})}, {"choice": ["a", "b"]}),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            {"regex": "a", "disable_any_whitespace": True},
        ),
        ({"guided_decoding": {"regex": "a", "backend": "auto"}}, {"regex": "a"}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_regex": "[a-z]"}, {"regex": "[a-z]"}),
        ({"guided_choice": ["a"], "guided_regex": None}, {"choice": ["a"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        (
            {"guided_json": TEXT, "guided_whitespace_pattern": " ?"},
            {"json": TEXT, "whitespace_pattern": " ?"},
        ),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ],
)
def test_all_forms_mean_the_same(values, wanted):
    params = SamplingParams.from_mapping(values)
    assert params.structured_outputs == StructuredOutputsParams(**wanted)
    assert params == SamplingParams.from_mapping({"structured_outputs": wanted})
    assert params == SamplingParams(**values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"response_format": {"type": "text"}},
        dict.fromkeys(("structured_outputs", "guided_decoding", "response_format", "guided_json")),
        {"guided_json_object": False, "guided_decoding_backend": "auto"},
        {"guided_decoding_guide_type": None, "guided_decoding_guide": None},
    ],
)
def test_no_constraint(values):
    assert SamplingParams.from_mapping(values) == SamplingParams(**values) == SamplingParams()


@pytest.mark.parametrize(
    ("kind", "guide", "wanted"),
    [
        ("json", None, {"json_object": True}),
        ("json_schema", TEXT, {"json": TEXT}),
        ("regex", "a", {"regex": "a"}),
        ("ebnf_grammar", "root ::= [0-9]+", {"grammar": "root ::= [0-9]+"}),
    ],
)
def test_guides_of_tensorrtllm(kind, guide, wanted):
    assert from_guide(kind, guide) == wanted


CHOICES = [f"choice {index}" for index in range(10_000)]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"structured_outputs": {}}, "structured_outputs: must have exactly one of json, regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs: must have exactly one of .*, got regex, choice",
        ),
        ({"structured_outputs": {"regexp": "a"}}, r"structured_outputs\.regexp: .* regex\?"),
        ({"structured_outputs": "{"}, "structured_outputs: is not valid JSON"),
        ({"structured_outputs": 3}, "structured_outputs: must be a JSON object, got 3"),
        ({"structured_outputs": {"json": 3}}, r"structured_outputs\.json: must be a JSON object"),
        ({"structured_outputs": {"json_object": False}}, r"structured_outputs\.json_object: must"),
        ({"structured_outputs": {"choice": []}}, r"structured_outputs\.choice: must be a list"),
        ({"structured_outputs": {"choice": ["a", 1]}}, r"structured_outputs\.choice: must be a l"),
        ({"structured_outputs": {"choice": [""]}}, r"structured_outputs\.choice: must not contain"),
        ({"structured_outputs": {"choice": CHOICES}}, r".*choice: at most 4096 strings, got 10000"),
        ({"structured_outputs": {"regex": "a" * 2**18}}, r".*regex: must have 1 to 131072 char"),
        ({"structured_outputs": {"regex": "\ud800"}}, r".*regex: must be a string"),
        (
            {"structured_outputs": {"json": TEXT, "whitespace_pattern": 3}},
            r"structured_outputs\.whitespace_pattern: must be a string",
        ),
        ({"guided_choice": "a"}, "guided_choice: must be a list"),
        (
            {"guided_json": TEXT, "guided_whitespace_pattern": 3},
            "guided_whitespace_pattern: must be a string",
        ),
        ({"guided_decoding": {"regexp": "a"}}, r"guided_decoding\.regexp: .* regex\?"),
        ({"guided_decoding": {"choice": "a"}}, r"guided_decoding\.choice: must be a list"),
        ({"guided_decoding": {}}, "guided_decoding: must have exactly one of json, regex"),
        (
            {"guided_decoding": {"regex": "a", "backend": "outlines"}},
            r"guided_decoding\.backend: must be auto or guidance, got 'outlines': constraints are",
        ),
        (
            {"guided_decoding": {"regex": "a"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and guided_decoding: exclude each other",
        ),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type: is missing"),
        ({"guided_decoding_guide_type": []}, "guided_decoding_guide_type: must be one of json, "),
        ({"response_format": {"type": "yaml"}}, r"response_format\.type: must be one of text, js"),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema: must be an"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex: exclude each other",
        ),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens: must be 0: structured_outputs dec"),
        ({"tools": []}, "tools: is a separate input"),
    ],
)
def test_mistakes_name_the_field(values, problem):
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        SamplingParams.from_mapping(values)


@pytest.mark.parametrize(
    ("kind", "guide", "problem"),
    [
        ("yaml", "x", "guided_decoding_guide_type: must be one of json, json_schema, regex"),
        ("regex", None, "guided_decoding_guide: is missing; the type regex needs one"),
    ],
)
def test_mistakes_in_guides(kind, guide, problem):
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        from_guide(kind, guide)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo")


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"structured_outputs": {"json": "{"}}, r"structured_outputs\.json: is not valid JSON"),
        ({"structured_outputs": {"json": "[1]"}}, r"structured_outputs\.json: must be a JSON obj"),
        ({"structured_outputs": {"json": nested(500)}}, r".*json: is nested deeper than 128"),
        ({"structured_outputs": {"json": "[" * 100_000}}, r".*json: is nested deeper than 128"),
        (
            {"structured_outputs": {"json": {"$ref": "#"}}},
            r".*json: the keyword \$ref leads to documents without end",
        ),
        (
            {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:9/"}}},
            r".*json: the keyword \$ref or ",
        ),
        ({"structured_outputs": {"json": {"$ref": "#/$defs/x"}}}, r".*json: Pointer '/\$defs/x'"),
        (
            {"structured_outputs": {"json": {"type": "array", "minItems": 2**63}}},
            r".*json: the keyword minItems must be an integer from 0 to 16777216",
        ),
        (
            {"guided_json": '{"minimum": 1e400}'},
            "guided_json: the keyword minimum must be a number",
        ),
        (
            {"guided_json": '{"minimum": NaN}'},
            "guided_json: is not valid JSON: NaN is not a number",
        ),
        ({"guided_json": {"not": {}}}, r"guided_json: .*not"),
        ({"guided_json": {"divisibleBy": 2}}, "guided_json: the keyword divisibleBy is not supp"),
        ({"guided_json": {"exclusiveMinimum": True}}, "guided_json: the keyword exclusiveMinimum"),
        (
            {"guided_json": {"uniqueItems": True, "x-guidance": {"lenient": True}}},
            "guided_json: .*uniqueItems",
        ),
        ({"guided_regex": "("}, "guided_regex: .*unclosed group"),
        ({"guided_regex": "(?=a)b"}, "guided_regex: .*look-around"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar: Rule 'missing' not found"),
        ({"guided_grammar": "start: missing"}, "guided_grammar: .*unknown name"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string", "minLength": 5, "maxLength": 3}},
                }
            },
            r"response_format\.json_schema\.schema: Unsatisfiable",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "magic"}}},
            "response_format: the format magic is not supported",
        ),
        ({"structured_outputs": {"structural_tag": {}}}, r".*structural_tag: must have a format"),
    ],
)
def test_constraints_that_cannot_be_enforced_are_refused(llm, values, problem):
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        llm.generate("x", SamplingParams.from_mapping(values))


def test_a_constraint_that_takes_too_long_is_refused(llm):
    """And the next one is answered."""
    patterns = {f"^{i:05}.*{i}$": {"pattern": f".*{i}.*"} for i in range(2500)}
    slow = {"type": "object", "patternProperties": patterns}
    with pytest.raises(InvalidRequest, match="^guided_json: schema_timeout: .* took over 0.5 s$"):
        llm.generate("x", SamplingParams.from_mapping({"guided_json": slow}))
    [answer] = llm.generate("x", SamplingParams.from_mapping({"guided_choice": ["yes"]}))
    assert answer.outputs[0].text == "yes"


def test_a_grammar_that_is_nested_too_deeply_is_refused(llm):
    deep = "root ::= " + "(" * 40_000 + '"a"' + ")" * 40_000
    with pytest.raises(InvalidRequest, match="^guided_grammar: is nested too deeply$"):
        llm.generate("x", SamplingParams.from_mapping({"guided_grammar": deep}))
