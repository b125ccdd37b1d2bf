"""Answers with reasoning and tool calls, in the format of each family, however they arrive."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

import pytest
from effort import ALL, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from paged_backend.parsers.delta import ResponseDelta
from paged_backend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ResponseFormat
from paged_backend.parsers.response import ResponseReader
from paged_backend.parsers.template import load_template
from paged_backend.values.options.responses import REASONING_PARSERS, TOOL_PARSERS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    },
    {"type": "function", "function": {"name": "g_x", "parameters": {"type": "object"}}},
]
NESTED = {"q": [1, {"z": '] } \\ " é 𝄞'}]}
F, G = ("f", {"a": 1}), ("g_x", NESTED)

# Parsers, the text of a model, and its content, reasoning and calls.
ANSWERS = {
    "hermes": (
        ("hermes", "qwen3"),
        "<think>\nhm <tool\n</think>\n\nSure <ok>.\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "g_x", "arguments": {json.dumps(NESTED)}}}\n</tool_call>',
        ("Sure <ok>.", "hm <tool", [F, G]),
    ),
    "hermes, a call in the reasoning": (
        ("hermes", "qwen3"),
        "<think>\nA <tool_call> is due.\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n</think>\n\nOk. </think>',
        ("Ok. </think>", "A <tool_call> is due.", [F]),
    ),
    "hermes, a lone end of reasoning": (
        ("hermes", "qwen3"),
        "hm\n</think>\n\nYes </think> no",
        ("hm\nYes </think> no", "", []),
    ),
    "hermes, the closing tag in a string": (
        ("hermes", ""),
        '<tool_call>{"name": "f", "arguments": {"b": "} </tool_call> <tool_call> {"}}</tool_call>',
        ("", "", [("f", {"b": "} </tool_call> <tool_call> {"})]),
    ),
    "hermes, arguments first": (
        ("hermes", ""),
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        ("", "", [F]),
    ),
    "llama3_json": (
        ("llama3_json", ""),
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; '
        f'{{"name": "g_x", "parameters": {json.dumps(NESTED)}}}',
        ("", "", [F, G]),
    ),
    "llama3_json, with a type": (
        ("llama3_json", ""),
        '{"type": "function", "name": "f", "parameters": {"a": 1}}; '
        f'{{"type" : "function", "name": "g_x", "parameters": {json.dumps(NESTED)}}}',
        ("", "", [F, G]),
    ),
    "llama3_json, parameters first": (
        ("llama3_json", ""),
        ' {"parameters": {"a": 1}, "type": "function", "name": "f"}',
        ("", "", [F]),
    ),
    "llama3_json, JSON with a type": (
        ("llama3_json", ""),
        ' {"type": "circle", "name": "f"}',
        (' {"type": "circle", "name": "f"}', "", []),
    ),
    "llama3_json, text": (
        ("llama3_json", ""),
        'It is {"name": "f", "parameters": {}}\n',
        ('It is {"name": "f", "parameters": {}}\n', "", []),
    ),
    "pythonic": (
        ("pythonic", ""),
        f"[f(a=1), g_x(q={NESTED['q']!r})]",
        ("", "", [F, G]),
    ),
    "mistral": (
        ("mistral", "mistral"),
        f'[THINK]abc[/THINK]Hi[TOOL_CALLS]f[ARGS]{{"a": 1}}[TOOL_CALLS]g_x{json.dumps(NESTED)}',
        ("Hi", "abc", [F, G]),
    ),
    "mistral_list": (
        ("mistral_list", ""),
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
        f'{{"name": "g_x", "arguments": {json.dumps(NESTED)}}}]',
        ("", "", [F, G]),
    ),
    "qwen3_coder": (
        ("qwen3_coder", "qwen3"),
        "Let me see.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nline 1\nline 2\n</parameter>\n</function>\n</tool_call>",
        ("Let me see.", "", [("f", {"a": 1, "b": "line 1\nline 2"})]),
    ),
    "qwen3_coder without the first mark": (
        ("qwen3_coder", "qwen3"),
        "Let me see <function> or <function=\n.\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
        "</function>\n</tool_call>\n<function=g_x></function> Done. <tool_call>",
        (
            "Let me see <function> or <function=\n.Done.",
            "",
            [F, ("g_x", {})],
        ),
    ),
    "qwen3_coder, a call in the reasoning": (
        ("qwen3_coder", "qwen3"),
        "<think>hm\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
        ("", "hm", [F]),
    ),
    "qwen3_coder, two calls in one element": (
        ("qwen3_coder", ""),
        "<tool_call>\n<function=f><parameter=a>1</parameter></function>\n<function=g_x></function>"
        "</tool_call>",
        ("", "", [F, ("g_x", {})]),
    ),
    "openai": (
        ("openai", "openai_gptoss"),
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        ("", "Think.", [F]),
    ),
    "openai, text": (
        ("openai", "openai_gptoss"),
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Hello",
        ("Hello", "Think.", []),
    ),
    "gemma4": (
        ("gemma4", "gemma4"),
        '<|channel>thought\nhm\n<channel|>Text<|tool_call>call:f{a:1,b:<|"|>x{y}<|"|>}<tool_call|>',
        ("Text", "hm", [("f", {"a": 1, "b": "x{y}"})]),
    ),
    "deepseek_v31": (
        ("deepseek_v31", "deepseek_r1"),
        "hm\n</think>\n\nHi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g_x<｜tool▁sep｜>'
        f"{json.dumps(NESTED)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("Hi", "hm", [F, G]),
    ),
    "deepseek_v3": (
        ("deepseek_v3", "deepseek_r1"),
        "<think>\nhm\n</think>\n\nHi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
        '```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        f"<｜tool▁sep｜>g_x\n```json\n{json.dumps(NESTED)}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        ("Hi", "hm", [F, G]),
    ),
    "a call without arguments": (
        ("mistral", ""),
        "[TOOL_CALLS]g_x[ARGS]",
        ("", "", [("g_x", {})]),
    ),
    "a call that cannot be read": (
        ("hermes", ""),
        "Hm.<tool_call>\nlook it up\n</tool_call> Sorry.",
        ("Hm.look it up\n Sorry.", "", []),
    ),
    "white space at both ends": (("hermes", "qwen3"), "  a \n b\n\n", ("  a \n b\n\n", "", [])),
}


def read(
    format: ResponseFormat,
    chunks: Sequence[str],
    prefix: str = "",
    *,
    is_cut: bool = False,
    is_continued: bool = False,
) -> ResponseDelta:
    """Join the deltas of chunks; each call must begin with its id and its name."""
    reader = ResponseReader(format, tools=TOOLS, prefix=prefix, is_continued=is_continued)
    deltas = [reader.feed(chunk) for chunk in chunks]
    deltas.append(reader.finish(is_cut=is_cut))
    num_calls = 0
    for part in (part for delta in deltas for part in delta.tool_calls):
        is_new = part.index == num_calls
        assert (part.name is not None) == (part.id is not None) == is_new
        num_calls += is_new
    assert reader.num_calls == num_calls
    return ResponseDelta.joined(deltas)


def summary(delta: ResponseDelta) -> tuple[str, str, list[tuple[str | None, object]]]:
    calls = [(call.name, json.loads(call.arguments)) for call in delta.tool_calls]
    return delta.content, delta.reasoning, calls


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_whatever_its_chunks(name: str) -> None:
    """In one chunk, in single characters, in every two chunks, and in random ones."""
    parsers, text, expected = ANSWERS[name]
    format = ResponseFormat(*parsers)
    assert summary(read(format, [text])) == expected
    assert summary(read(format, list(text))) == expected
    for cut in range(len(text)):
        assert summary(read(format, [text[:cut], text[cut:]])) == expected

    @settings(max_examples=examples(200))
    @given(st.sets(st.integers(0, len(text)), max_size=12))
    def check(cuts: set[int]) -> None:
        places = [0, *sorted(cuts), len(text)]
        chunks = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
        assert summary(read(format, chunks)) == expected

    check()


def test_every_parser_is_an_option() -> None:
    assert set(TOOL_PARSERS) == {"auto", "none", *TOOL_FORMATS}
    assert set(REASONING_PARSERS) == {"auto", "none", *REASONING_FORMATS}
    assert {parsers[0] for parsers, _, _ in ANSWERS.values()} == set(TOOL_FORMATS)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_cut_answer_is_the_beginning_of_the_whole_one(name: str) -> None:
    """At every character: no part of a mark or of a call's head becomes content or reasoning."""
    parsers, text, (content, reasoning, _) = ANSWERS[name]
    format = ResponseFormat(*parsers)
    whole = read(format, [text])
    for end in range(len(text)):
        for chunks in ([text[:end]], list(text[:end])):
            cut = read(format, chunks, is_cut=True)
            assert content.startswith(cut.content)
            assert reasoning.startswith(cut.reasoning)
            calls = list(zip(cut.tool_calls, whole.tool_calls, strict=False))
            assert len(calls) == len(cut.tool_calls)
            for index, (call, complete) in enumerate(calls):
                assert call.name == complete.name
                assert complete.arguments.startswith(call.arguments)
                is_last = index == len(calls) - 1
                assert is_last or call.arguments == complete.arguments


def test_a_call_is_complete_once_its_arguments_are() -> None:
    reader = ResponseReader(ResponseFormat("hermes"), tools=TOOLS)
    reader.feed('<tool_call>{"name": "f", "arguments": {"a": 1')
    assert reader.is_inside_call
    reader.feed("}")
    assert not reader.is_inside_call


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("hermes", 'Hm.<tool_call>{"name": "get', 'Hm.{"name": "get'),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}'),
        ("llama3_json", "<|python_tag|>print(3)", "print(3)"),
        ("pythonic", "[see(x), or f]", "[see(x), or f]"),
        ("pythonic", "[1, 2]", "[1, 2]"),
        ("qwen3_coder", "<tool_call>no</tool_call> Sorry.", "no Sorry."),
        ("mistral", "[TOOL_CALLS]no, or", "no, or"),
        ("gemma4", "<|tool_call>none<tool_call|>", "none"),
    ],
)
def test_what_is_no_call_is_content(parser: str, text: str, content: str) -> None:
    for chunks in ([text], list(text)):
        assert summary(read(ResponseFormat(parser), chunks)) == (content, "", [])


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_long_arguments_arrive_in_linear_time(parser: str) -> None:
    """A file of 30 or 300 kB, in pieces of a few characters: each is passed on at once."""
    value = 'if a[0] == "{": # </tool> \n\t\\' * (10_000 if ALL else 1000)
    head, tail = {
        "hermes": ('<tool_call>{"name": "f", "arguments": {"b": ', "}}</tool_call>"),
        "llama3_json": ('{"name": "f", "parameters": {"b": ', "}}"),
        "pythonic": ("[f(b=", ")]"),
        "mistral": ('[TOOL_CALLS]f[ARGS]{"b": ', "}"),
        "mistral_list": ('[TOOL_CALLS] [{"name": "f", "arguments": {"b": ', "}}]"),
        "qwen3_coder": (
            "<tool_call>\n<function=f>\n<parameter=b>\n",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        "openai": ('<|channel|>commentary to=functions.f<|message|>{"b": ', "}<|call|>"),
        "gemma4": ("<|tool_call>call:f{b:", "}<tool_call|>"),
        "deepseek_v31": ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"b": ', "}<｜tool▁call▁end｜>"),
        "deepseek_v3": (
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"b": ',
            "}\n```<｜tool▁call▁end｜>",
        ),
    }[parser]
    written = {"qwen3_coder": value, "gemma4": f'<|"|>{value}<|"|>'}.get(parser, json.dumps(value))
    text = head + written + tail
    reader = ResponseReader(ResponseFormat(parser), tools=TOOLS)
    deltas = []
    for start in range(0, len(text), 7):
        delta = reader.feed(text[start : start + 7])
        inside = len(head) + 100 < start < len(text) - 100
        # A mark at the end, or an escape sequence, may wait for the next piece.
        assert not inside or delta.tool_calls or "\\" in text[start : start + 7]
        deltas.append(delta)
    deltas.append(reader.finish())
    assert summary(ResponseDelta.joined(deltas)) == ("", "", [("f", {"b": value})])


@pytest.mark.parametrize(
    "value",
    [
        """[True, False, None, -1, +2, 1.5e3, 0x1F, 1_000, 'a' "b", "\\x41\\u00e9\\n\\101"]""",
        """{'k': {"n": []}, "e": {}, 'l': [1, [2, ], ]}""",
        "'''a\n'b'''",
        "'\\U0001d11e é'",
    ],
)
def test_python_reads_the_same_literals(value: str) -> None:
    text = f"[f(q={value})]"
    for chunks in ([text], list(text)):
        whole = read(ResponseFormat("pythonic"), chunks)
        assert summary(whole)[2] == [("f", {"q": ast.literal_eval(value)})]


# As checkpoints describe these formats to transformers.
FUNCTION = {"name": "{name}", "arguments": "{content}"}
TEMPLATES: dict[str, dict[str, Any]] = {
    "qwen3_coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
        "transform": {"type": "function", "function": FUNCTION},
    },
    "gemma4": {
        "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": {"type": "function", "function": FUNCTION},
    },
    "hermes": {"open": "<tool_call>", "close": "</tool_call>", "content": "json"},
    "pythonic": {"open_pattern": r"\A(?=\[\w+\()", "content": "python-call-list"},
}
SAME_CALLS = {
    "qwen3_coder": (
        "Ok. <tool_call>\n<function=f>\n<parameter=a>\n3.0\n</parameter>\n<parameter=b>\n1\n\n"
        "</parameter>\n<parameter=c>x</parameter></function>\n</tool_call>\n"
        "<tool_call><function=g_x></function></tool_call>"
    ),
    "gemma4": (
        'Ok.<|tool_call>call:f{a:<|"|>12<|"|>,b:<|"|>"q" \\n\n<|"|>,"c":["x\\n",{d:true}],e:-1.5}'
        "<tool_call|>"
    ),
    "hermes": 'Ok.<tool_call>{"name": "f", "arguments": {"a": 1, "b": "x"}}</tool_call>',
    "pythonic": """[f(a=1, b='x\\n"', c=[True, None, {"d": -1.5e3}]), g_x()]""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_finds_the_same_calls(name: str) -> None:
    """With the format's own reader, and with the reader of a checkpoint's own template."""
    text = SAME_CALLS[name]
    calls = {"repeats": True, **TEMPLATES[name]}
    template = {"start_anchor_pattern": r"\A", "fields": {"content": {}, "tool_calls": calls}}
    message = parse_response(text, template, prefix="", tools=TOOLS)
    found = [
        call.get("function", call)
        for item in message["tool_calls"]
        for call in (item if isinstance(item, list) else [item])
    ]
    expected = [(call["name"], call["arguments"]) for call in found]
    for format in (ResponseFormat(name), ResponseFormat("", "", load_template(template))):
        for chunks in ([text], list(text)):
            assert summary(read(format, chunks))[2] == expected


def test_reasoning_that_the_prompt_has_begun() -> None:
    format = ResponseFormat("hermes", "qwen3")
    whole = read(format, ["I see", ".\n</thi", "nk>\n\nYes"], prefix="<think>\n")
    assert (whole.content, whole.reasoning) == ("Yes", "I see.")


ASSISTANT = "<｜User｜>Hi</think><｜Assistant｜>"


@pytest.mark.parametrize(
    ("prompt", "text", "content", "reasoning"),
    [
        ("", "I see", "", "I see"),
        ("", "I see.</think>Yes", "Yes", "I see."),
        ("", " <think>\nI see.</think>Yes", "Yes", "I see."),
        ("", "<thin", "", "<thin"),
        (f"{ASSISTANT}<think>\n", "I see.</think>Yes", "Yes", "I see."),
        (f"{ASSISTANT}<think>\n", "<think>I see.</think>Yes", "Yes", "I see."),
        (f"{ASSISTANT}<think>\n\n</think>\n\n", "Yes", "Yes", ""),
        (f"{ASSISTANT}</think>", "Yes", "Yes", ""),
        (f"What is </think>?{ASSISTANT}", "I see.</think>Yes", "Yes", "I see."),
        ("<think>" * 9 + "x" * 2**20, "I see", "", "I see"),
    ],
)
def test_deepseek_r1_reasons_first_unless_the_prompt_has_ended_that(
    prompt: str, text: str, content: str, reasoning: str
) -> None:
    """As vLLM's parser of this name; the mark at the beginning is no part of the reasoning."""
    for chunks in ([text], list(text)):
        whole = read(ResponseFormat("hermes", "deepseek_r1"), chunks, prompt)
        assert (whole.content, whole.reasoning) == (content, reasoning)


@pytest.mark.parametrize(
    ("prompt", "text", "content", "reasoning"),
    [
        (f"{ASSISTANT}<think>I see.</think>Yes", ", so", ", so", ""),
        (f"{ASSISTANT}<think>I", " see.</think>Yes", "Yes", "see."),
        (f"What is </think>?{ASSISTANT}<think>I", " see.</think>Yes", "Yes", "see."),
    ],
)
def test_deepseek_r1_goes_on_with_a_message_where_it_was(
    prompt: str, text: str, content: str, reasoning: str
) -> None:
    whole = read(ResponseFormat("hermes", "deepseek_r1"), [text], prompt, is_continued=True)
    assert (whole.content, whole.reasoning.strip()) == (content, reasoning)


def test_arguments_arrive_as_they_are_written() -> None:
    reader = ResponseReader(ResponseFormat("hermes"), tools=TOOLS)
    deltas = [reader.feed(text) for text in ('<tool_call>{"name": "f", "arg', 'uments": {"b": "on')]
    parts = [part for delta in deltas for part in delta.tool_calls]
    assert [(part.name, part.arguments) for part in parts] == [("f", '{"b": "on')]
    assert [part.arguments for part in reader.feed("ce").tool_calls] == ["ce"]


def test_ids_differ_and_have_the_length_of_the_format() -> None:
    ids = {
        call.id
        for _ in range(50)
        for call in read(ResponseFormat("mistral"), [ANSWERS["mistral"][1]]).tool_calls
    }
    assert len(ids) == 100
    assert {len(call_id or "") for call_id in ids} == {9}


def test_without_tools_calls_are_text() -> None:
    text = ANSWERS["hermes"][1]
    reader = ResponseReader(ResponseFormat("hermes", "qwen3"))
    delta = ResponseDelta.joined([reader.feed(text), reader.finish()])
    assert delta.content == text.split("</think>")[1].strip()


def test_a_checkpoints_own_template() -> None:
    """Its values are taken as they are, and whatever comes after a call that it refuses is text."""
    template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "content": {},
            "tool_calls": {"open": "<<", "close": ">>", "content": "json", "repeats": True},
        },
    }
    format = ResponseFormat("hermes", "", load_template(template))
    whole = read(
        format, ['Yes. <<{"name": "f", ', '"arguments": {"a": 1}}>>'], prefix="<|assistant|>"
    )
    assert summary(whole) == ("Yes.", "", [F])
    assert read(format, ["Yes. <<no", ">> and <<"]).content == "Yes.no and <<"


SCHEMAS = {
    "an enum": ({"enum": [1, 2]}, "1", 1),
    "an enum of strings": ({"enum": ["1", "2"]}, "1", "1"),
    "an enum of both": ({"enum": ["auto", 2]}, "auto", "auto"),
    "a constant": ({"const": True}, "true", True),
    "all of": ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "1", 1),
    "a reference": ({"$ref": "#/$defs/point"}, '{"x": 1}', {"x": 1}),
    "a reference in a union": (
        {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]},
        '{"x": 1}',
        {"x": 1},
    ),
    "a reference to a list": ({"$ref": "#/$defs/of~1many/anyOf/0"}, "[1]", [1]),
    "a circle": ({"$ref": "#/$defs/circle"}, "[1]", "[1]"),
    "no such reference": ({"$ref": "#/$defs/none/0"}, "[1]", "[1]"),
    "a reference elsewhere": ({"$ref": "http://localhost/a#/$defs/point"}, "{}", "{}"),
    "properties": ({"properties": {"x": {}}}, '{"x": 1}', {"x": 1}),
    "items": ({"items": {"type": "integer"}}, "[1]", [1]),
    "an unknown type": ({"type": ["any", "integer"]}, "1", 1),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_parameters_without_a_type_have_the_type_of_their_schema(name: str) -> None:
    schema, text, value = SCHEMAS[name]
    parameters = {
        "type": "object",
        "properties": {"p": schema},
        "$defs": {
            "point": {"type": "object", "properties": {"x": {"type": "integer"}}},
            "of/many": {"anyOf": [{"items": {}}]},
            "circle": {"allOf": [{"$ref": "#/$defs/circle"}]},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    reader = ResponseReader(ResponseFormat("qwen3_coder"), tools=tools)
    call = f"<tool_call><function=f><parameter=p>{text}</parameter></function></tool_call>"
    delta = ResponseDelta.joined([reader.feed(call), reader.finish()])
    assert json.loads(delta.tool_calls[0].arguments) == {"p": value}
