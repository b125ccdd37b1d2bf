"""Grammars of tool calls: whatever they generate is read as calls that their tools accept."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from effort import ALL
from llguidance import LLMatcher
from valid_json import validate

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.grammar.build import build_grammar
from paged_backend.grammar.check import checked_grammar
from paged_backend.grammar.errors import ConstraintError
from paged_backend.grammar.matcher import GrammarError, compile_grammar
from paged_backend.grammar.vocabulary import make_vocabulary, special_token_ids
from paged_backend.parsers.delta import ResponseDelta
from paged_backend.parsers.formats import TOOL_FORMATS, ResponseFormat
from paged_backend.parsers.response import ResponseReader
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.output_constraint import OutputConstraint, Reasoning
from paged_backend.values.structured_outputs import StructuredOutputsParams
from paged_backend.values.tool_choice import ToolChoice, read_tools

EOS = "<|eot|>"
MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *('<|"|>', "<|tool_call>", "<tool_call|>"),
)
SPECIAL_MARKS = (
    *("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", EOS),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)


def tool(name: str, parameters: dict[str, Any], **more: object) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, **more}
    return {"type": "function", "function": function}


TOOLS = [
    tool(
        "lookup",
        {
            "type": "object",
            "title": "What to look up",
            "properties": {
                "name": {"type": "string", "description": "a dotted name"},
                "limit": {"type": "integer"},
                "deep": {"type": "boolean"},
                "mode": {"enum": ["a", "b c", None]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {
                    "type": "object",
                    "properties": {
                        "x": {"type": "number"},
                        "y": {"type": ["string", "null"]},
                        "z": {"anyOf": [{"const": True}, {"type": "array"}]},
                    },
                    "required": ["x"],
                    "additionalProperties": False,
                },
            },
            "required": ["name"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False}),
    tool("say", {"type": "object"}),
]
SCHEMAS = {item["function"]["name"]: item["function"]["parameters"] for item in TOOLS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo's, with the marks of all formats as tokens of their own."""
    backend = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in MARKS])
    backend.add_special_tokens([tokenizers.AddedToken(text) for text in SPECIAL_MARKS])
    return Tokenizer(backend)


class Grammars:
    """Compiles constraints for a tokenizer, and follows them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.added_tokens[EOS]
        self._vocabulary = make_vocabulary(tokenizer, tokenizer.vocab_size, [self._eos])
        self._special = special_token_ids(tokenizer, self._vocabulary)

    def compile(self, constraint: OutputConstraint) -> str:
        return checked_grammar(self._vocabulary, self._special, constraint)

    def accepts(self, constraint: OutputConstraint, text: str) -> bool:
        matcher = compile_grammar(self._vocabulary, self.compile(constraint))
        return matcher.consume_tokens(self._tokenizer.encode(text)) and matcher.is_accepting()

    def walk(self, constraint: OutputConstraint, rng: random.Random) -> str | None:
        """Return a random text of the grammar; None if it has not ended after 300 tokens.

        From the sixtieth token on, what closes something is preferred.
        """
        matcher = compile_grammar(self._vocabulary, self.compile(constraint))
        token_ids: list[int] = []
        while len(token_ids) < 300 and not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]
            if len(token_ids) > 60 and (closing := self._closing(matcher)):
                assert matcher.consume_tokens(closing)
                token_ids += closing
                continue
            token_id = rng.choice(allowed)
            if token_id == self._eos or (matcher.is_accepting() and rng.random() < 0.5):
                break
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
        else:
            return None if not matcher.is_stopped() else self._decode(token_ids)
        return self._decode(token_ids)

    def _closing(self, matcher: LLMatcher) -> list[int]:
        """Return the tokens of a text that is allowed and closes something; empty for none."""
        for text in _CLOSING:
            token_ids = self._tokenizer.encode(text)
            if matcher.validate_tokens(token_ids) == len(token_ids):
                return token_ids
        return []

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


_CLOSING = ('<|"|>', "\n</parameter>\n</function>", "\n</parameter>\n", '"', "]", "}", ")", ":")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def constraint(
    parser: str, tools: list[dict[str, Any]] = TOOLS, **choice: bool
) -> OutputConstraint:
    return OutputConstraint(tool_choice=ToolChoice(read_tools(tools), **choice), tool_parser=parser)


def read(parser: str, text: str) -> ResponseDelta:
    reader = ResponseReader(ResponseFormat(parser, "qwen3"), tools=TOOLS)
    return ResponseDelta.joined([reader.feed(text), reader.finish()])


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_what_a_grammar_generates_is_read_as_valid_calls(parser: str, grammars: Grammars) -> None:
    rng = random.Random(parser)
    called: set[str | None] = set()
    for number in range(40 if ALL else 16):
        parallel, only = number % 2 == 0, TOOLS[number % 4 : number % 4 + 1]
        some = constraint(parser, only or TOOLS, required=True, parallel=parallel)
        text = grammars.walk(some, rng)
        if text is None:
            continue
        answer = read(parser, text)
        assert answer.content.strip() == ""
        assert answer.tool_calls
        assert parallel or len(answer.tool_calls) == 1
        for call in answer.tool_calls:
            validate(json.loads(call.arguments), SCHEMAS[call.name])
            called.add(call.name)
    assert called == set(SCHEMAS)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_the_model_may_answer_with_text_or_begin_a_valid_call(
    parser: str, grammars: Grammars
) -> None:
    rng = random.Random(parser)
    auto = constraint(parser)
    for text in ("Hello <b>", "The answer is [4], or {4}.\n", '{"type": "circle"}', ""):
        assert grammars.accepts(auto, text)
    call = None
    while call is None:
        call = grammars.walk(constraint(parser, required=True, parallel=False), rng)
    assert grammars.accepts(auto, call)
    for name in SCHEMAS:  # none of the tools has such a name
        call = call.replace(name, f"{name}ing")
    assert not grammars.accepts(auto, call)


def test_a_mark_cannot_be_spelled_with_other_tokens(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """Otherwise the text would be read as a call that no grammar has checked."""
    ids = tokenizer.encode("<tool_ca") + tokenizer.encode("ll") + tokenizer.encode(">")
    assert tokenizer.decode(ids) == "<tool_call>"
    matcher = compile_grammar(grammars._vocabulary, grammars.compile(constraint("hermes")))
    assert not matcher.consume_tokens(ids)


@pytest.mark.parametrize("end", ["", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"])
def test_a_call_without_its_mark_is_not_written(end: str, grammars: Grammars) -> None:
    """The reader takes it for a call, which no grammar has checked."""
    auto, text = constraint("qwen3_coder"), "See <function>.\n"
    assert grammars.accepts(auto, text + end)
    bare = "<function=lookup>\n</function>\n"
    assert read("qwen3_coder", text + bare).tool_calls
    assert not grammars.accepts(auto, text + bare + end)


def test_text_may_be_constrained_beside_calls(grammars: Grammars) -> None:
    tools = ToolChoice(read_tools(TOOLS))
    either = OutputConstraint(StructuredOutputsParams(regex="[0-9]+"), tools, "hermes")
    assert grammars.accepts(either, "42")
    assert not grammars.accepts(either, "forty")
    assert grammars.accepts(
        either, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    )


@pytest.mark.parametrize(
    ("reasoning", "text", "is_accepted"),
    [
        (Reasoning("qwen3"), "7", True),
        (Reasoning("qwen3"), "<think>\nSix or seven.\n</think>\n\n7", True),
        (Reasoning("qwen3"), "<think>\nSix or seven.\n7", False),
        (Reasoning("qwen3", is_open=True), "Six or seven.</think>7", True),
        (Reasoning("qwen3", is_open=True), "7", False),
        (Reasoning("qwen3", is_open=True, max_tokens=2), "ab</think>7", True),
        (Reasoning("qwen3", is_open=True, max_tokens=2), "Six or seven or eight</think>7", False),
        (Reasoning("qwen3", is_open=True, max_tokens=0), "</think>7", True),
        (Reasoning("deepseek_r1", is_open=True), "Six or seven.</think>7", True),
        (Reasoning("deepseek_r1", is_open=True), "<think>\nSix or seven.</think>7", True),
        (Reasoning("deepseek_r1", is_open=True), "7", False),
        (
            Reasoning("openai_gptoss"),
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>7",
            True,
        ),
        (Reasoning("openai_gptoss"), "<|channel|>final<|message|>7", True),
        (Reasoning("openai_gptoss"), "<|channel|>final<|message|>x", False),
    ],
    ids=str,
)
def test_a_constraint_begins_after_the_reasoning(
    reasoning: Reasoning, text: str, is_accepted: bool, grammars: Grammars
) -> None:
    digits = OutputConstraint(StructuredOutputsParams(regex="[0-9]+"), reasoning=reasoning)
    assert grammars.accepts(digits, text) is is_accepted


@pytest.mark.parametrize("thought", ["Hm.", "Hm. <tool_call>"])
def test_reasoning_does_not_begin_a_call(
    thought: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """The reader would take it for a call, which no grammar has checked.

    The model has no tokens for the marks: it writes them in characters.
    """
    some = replace(constraint("hermes", required=True), reasoning=Reasoning("qwen3"))
    matcher = compile_grammar(grammars._vocabulary, build_grammar(some, {}))
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    text = f"<think>\n{thought}\n</think>\n\n{call}"
    token_ids = [token_id for character in text for token_id in tokenizer.encode(character)]
    is_accepted = matcher.consume_tokens(token_ids) and matcher.is_accepting()
    assert is_accepted is (thought == "Hm.")


UNSUPPORTED = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_a_strict_tool_is_enforced_or_refused(parser: str, grammars: Grammars) -> None:
    with pytest.raises(ConstraintError) as caught:
        grammars.compile(constraint(parser, [*TOOLS, tool("odd", UNSUPPORTED, strict=True)]))
    assert caught.value.field == "tools[3].function.parameters"
    assert "not" in str(caught.value)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_any_object_will_do_for_a_tool_that_is_not_strict(parser: str, grammars: Grammars) -> None:
    """The other tools are enforced all the same."""
    rng = random.Random(parser)
    tools = [tool("odd", UNSUPPORTED), TOOLS[1]]
    for _ in range(10):
        text = grammars.walk(constraint(parser, tools, required=True, parallel=False), rng)
        if text is not None:
            (call,) = read(parser, text).tool_calls
            assert isinstance(json.loads(call.arguments), dict)
            assert call.name == "odd" or json.loads(call.arguments) == {}


def test_another_fault_is_not_blamed_on_a_tool(grammars: Grammars) -> None:
    broken = OutputConstraint(
        StructuredOutputsParams(regex="["), ToolChoice(read_tools(TOOLS)), "hermes"
    )
    with pytest.raises(GrammarError):
        grammars.compile(broken)


@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}], "minLength": 3}}}, "minLength"),
        ({"properties": {"a": {"enum": ["x"], "minLength": 3}}}, "minLength"),
        ({"properties": {"a": {"type": "string", "enum": [3]}}}, "enum"),
        ({"properties": {"a": {"additionalProperties": {"type": "null"}}}}, "additionalP"),
        ({"properties": {}, "required": ["a"]}, "required"),
        ({"properties": {"a": {"$ref": "#"}}}, r"\$ref"),
        ({"properties": {"a": {"type": "thing"}}}, "thing"),
        ({"properties": {"a": False}}, "allows no value"),
        ({"properties": {"a b>": {"type": "integer"}}, "maxProperties": 3}, "maxProperties"),
    ],
    ids=str,
)
@pytest.mark.parametrize("parser", ["pythonic", "gemma4", "qwen3_coder"])
def test_other_notations_than_json_name_what_they_cannot_write(
    parser: str, parameters: dict[str, Any], keyword: str, grammars: Grammars
) -> None:
    strict = tool("f", {"type": "object", **parameters}, strict=True)
    if parser == "qwen3_coder" and keyword in ("additionalP", "thing"):
        pytest.skip("a value that is no string is JSON there")
    with pytest.raises(ConstraintError, match=keyword):
        grammars.compile(constraint(parser, [strict]))


def test_names_that_are_none_in_python(grammars: Grammars) -> None:
    with pytest.raises(ConstraintError, match="must be a name in Python") as caught:
        grammars.compile(constraint("pythonic", [tool("get-time", {})]))
    assert caught.value.field == "tools[0].function.name"
