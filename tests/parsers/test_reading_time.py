"""Readers take time linear in an answer, whatever it is and however it arrives."""

from __future__ import annotations

import functools
import gc
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from effort import ALL

from paged_backend.parsers.delta import ResponseDelta
from paged_backend.parsers.formats import TOOL_FORMATS, ResponseFormat
from paged_backend.parsers.reading_time import (
    MAX_SAVED_S,
    READING_S,
    READING_S_PER_CHARACTER,
    ReadingTime,
)
from paged_backend.parsers.response import ResponseReader
from paged_backend.parsers.schema_values import types_of
from paged_backend.parsers.source import MAX_HEAD_LENGTH
from paged_backend.parsers.template import MATCH_TIMEOUT_S, PIECE_TIMEOUT_S, load_template

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}]
LENGTH = MAX_HEAD_LENGTH + 500

# What an answer begins with, for each format: text, heads of calls that never end, and arguments.
JSON_HEADS = ('{"name": "', '{"name": "f", "x', '{"arguments": {"b": "', "{")
HEADS = {
    "hermes": [f"<tool_call>{head}" for head in JSON_HEADS],
    "llama3_json": ['{"name"', '{"name": "', '{"name": "f", "parameters": {"b": "'],
    "pythonic": ["[f", "[f(", "[f(a", "[f(a=", "[f(a='", "[f(a={"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f[CALL_ID]", '[TOOL_CALLS]f{"b": "'],
    "mistral_list": [f"[TOOL_CALLS] [{head}" for head in JSON_HEADS],
    "qwen3_coder": [
        f"<tool_call>{head}"
        for head in ("", "<function=", "<function=f>", "<function=f><parameter=")
    ]
    + [f"<tool_call><function=f><parameter={name}>" for name in "ab"]
    + ["<function=", "<function=f><parameter=b>"],
    "openai": [
        *("<|start|>", "<|channel|>", "<|channel|>analysis<|message|>"),
        "<|channel|>commentary to=functions.f",
        '<|channel|>commentary to=functions.f<|message|>{"b": "',
    ],
    "gemma4": [f"<|tool_call>{head}" for head in ("", "call:", "call:f{", 'call:f{a:<|"|>')],
    "deepseek_v31": [f"<｜tool▁call▁begin｜>{head}" for head in ("", "f", "f<｜tool▁sep｜>")],
    "deepseek_v3": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{head}"
        for head in ("", "function<｜tool▁sep｜>f", "function<｜tool▁sep｜>f\n```json")
    ],
}
# What follows, again and again.
UNITS = (*" a[", '{"name": "f"}, ', '<tool_call>{"x":', "<|channel|>", "</parameter>", "<function=")


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """A collection looks at all objects of all tests, which can take over a second."""
    gc.disable()
    yield
    gc.enable()


def reader(parser: str) -> ResponseReader:
    reasoning = "openai_gptoss" if parser == "openai" else "qwen3"
    return ResponseReader(ResponseFormat(parser, reasoning), tools=TOOLS)


def seconds(parser: str, text: str) -> float:
    """Return the processor time for a text that arrives in small pieces."""
    reading = reader(parser)
    start = time.thread_time()
    for start_of_piece in range(0, len(text), 6):
        reading.feed(text[start_of_piece : start_of_piece + 6])
    reading.finish()
    return time.thread_time() - start


def test_all_formats_have_heads() -> None:
    assert set(HEADS) == set(TOOL_FORMATS)


@pytest.mark.parametrize("parser", TOOL_FORMATS)
def test_three_times_the_text_takes_three_times_the_time(parser: str) -> None:
    """White space, names that never end, deep values, unclosed strings, many marks, reasoning.

    A reader that scans its text again for each piece would take nine times the time. A linear one
    takes up to five and a half times: a name that is too long costs less than the text after it.
    Each head has every fourth unit, unless everything is tried.
    """
    for number, head in enumerate(("", "<think>", "<think><tool_call>", *HEADS[parser])):
        for unit in UNITS if ALL else UNITS[number % 4 :: 4]:
            text = head + unit * (3 * LENGTH // len(unit))
            once = thrice = math.inf
            for _ in range(8):  # a busy machine only adds time
                once = min(once, seconds(parser, text[:LENGTH]))
                thrice = min(thrice, seconds(parser, text))
                if thrice < 7 * once and thrice < len(text) * READING_S_PER_CHARACTER:
                    break
            else:
                pytest.fail(f"{head!r}, {unit!r}: {once:.3f} s, three times {thrice:.3f} s")


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("llama3_json", " " * 9000, " " * 9000),
        ("pythonic", f"[f({'a' * 9000}", f"[f({'a' * 9000}"),
        ("hermes", f'<tool_call>{{"name": "{"a" * 9000}', f'{{"name": "{"a" * 9000}'),
        ("qwen3_coder", f"<tool_call><function={'a' * 9000}", f"<function={'a' * 9000}"),
        ("gemma4", f"<|tool_call>call:{'a' * 9000}", f"call:{'a' * 9000}"),
        ("mistral", f"[TOOL_CALLS]{'a' * 9000}", "a" * 9000),
    ],
    ids=["llama3_json", "pythonic", "hermes", "qwen3_coder", "gemma4", "mistral"],
)
def test_a_head_that_is_too_long_is_text(parser: str, text: str, content: str) -> None:
    """It arrives before the answer ends, however the pieces are."""
    for size in (1, 1000, len(text)):
        reading = reader(parser)
        deltas = [reading.feed(text[i : i + size]) for i in range(0, len(text), size)]
        before = ResponseDelta.joined(deltas).content
        assert len(before) > MAX_HEAD_LENGTH or not before.strip()
        assert ResponseDelta.joined([*deltas, reading.finish()]).content == content


HOSTILE = {
    "the beginning of a call": {"open_pattern": r"(?:x+x+)+y", "close": ">"},
    "the end of a call": {"open": "<", "close_pattern": r"(?:x+x+)+y"},
    "elements": {
        "open": "<",
        "close": ">",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"(?P<key>(?:x+x+)+)y(?P<value>)"},
    },
    "strings": {
        "open": "<",
        "close": ">",
        "content": "json",
        "content_args": {"string_delims": [["x", "]"]]},
    },
}


@pytest.mark.parametrize("place", HOSTILE)
def test_a_checkpoints_own_patterns_cannot_stop_a_server(place: str) -> None:
    """No piece takes long, an answer takes little in all, and its rest is text."""
    fields = {"content": {}, "tool_calls": HOSTILE[place]}
    template = load_template({"start_anchor": "<|a|>", "fields": fields})
    reading = ResponseReader(ResponseFormat("", "", template), tools=TOOLS)
    text = "<" + "x" * 20_000 + ">"
    slowest, start, deltas = 0.0, time.thread_time(), []
    for character in text:
        before = time.thread_time()
        deltas.append(reading.feed(character))
        slowest = max(slowest, time.thread_time() - before)
    deltas.append(reading.finish())
    assert slowest < 10 * MATCH_TIMEOUT_S
    assert time.thread_time() - start < 2 * (READING_S + READING_S_PER_CHARACTER * len(text))
    assert ResponseDelta.joined(deltas).content.count("x") == 20_000


def test_the_completions_of_a_request_share_the_time() -> None:
    """Also what their prompt begins, and the end of each is read for each of them."""
    calls = {"open": "<", "close_pattern": r">(?=(?:x+x+)+y|)", "repeats": True}
    template = load_template(
        {"start_anchor": "|a|", "fields": {"content": {}, "tool_calls": calls}}
    )
    shared, start = ReadingTime(), time.thread_time()
    format, prefix = ResponseFormat("", "", template), "|a|" + f"<>{'x' * 14}" * 4000
    readers = [
        ResponseReader(format, tools=TOOLS, prefix=prefix, reading_time=shared) for _ in range(64)
    ]
    answers = [ResponseDelta.joined([r.feed("Hello"), r.finish()]).content for r in readers]
    assert time.thread_time() - start < 2 * READING_S
    assert answers[-1] == "Hello"


def test_an_answer_whose_prompt_was_not_read_is_content() -> None:
    """The time of the request was used up, and more is earned later."""
    fields = {"content": {}, "thinking": {"open": "<think>", "close": "</think>"}}
    template = load_template({"start_anchor": "|a|", "fields": fields})
    shared = ReadingTime()
    shared.left_s = 0.0
    format, text = ResponseFormat("", "", template), "I <think>see</think>it."
    reading = ResponseReader(format, prefix="|a|<think>", reading_time=shared)
    shared.earn(1_000_000)
    whole = ResponseDelta.joined([reading.feed(text), reading.finish()])
    assert (whole.content, whole.reasoning) == (text, "")


def test_no_more_time_is_saved_up_than_the_others_may_wait() -> None:
    """Long answers have earned more, which all their ends could use at once."""
    shared = ReadingTime()
    for _ in range(64):
        ResponseReader(ResponseFormat("hermes"), reading_time=shared).feed("x" * 10_000)
    assert shared.left_s <= MAX_SAVED_S
    with shared.spend() as deadline_s:
        assert deadline_s < time.thread_time() + 1.01 * READING_S


def test_a_pause_of_the_interpreter_does_not_end_the_reading_of_a_long_answer() -> None:
    reading = ResponseReader(ResponseFormat("hermes", "qwen3"), tools=TOOLS)
    reading.feed("<think>" + "x" * 50_000)
    reading._time.left_s -= 2 * READING_S
    assert reading.feed("x</think>Yes").content == "Yes"


def test_many_marks_in_a_prompt_have_a_limit_together() -> None:
    """Each of them may be searched for at length."""
    calls = {"open": "<", "close_pattern": r">(?=(?:x+x+)+y|)", "repeats": True}
    fields = {"content": {}, "tool_calls": calls}
    template = load_template({"start_anchor": "|a|", "fields": fields})
    start = time.thread_time()
    prefix = "|a|" + f"<>{'x' * 14}" * 4000
    ResponseReader(ResponseFormat("", "", template), tools=TOOLS, prefix=prefix)
    assert time.thread_time() - start < 10 * PIECE_TIMEOUT_S


def test_the_beginning_of_an_answer_is_looked_for_with_a_limit() -> None:
    """The prompt is a client's, and the pattern is by the author of the model."""
    fields = {"content": {}}
    template = load_template({"start_anchor_pattern": r"(?:x+x+)+y", "fields": fields})
    start = time.thread_time()
    reading = ResponseReader(ResponseFormat("", "", template), prefix="x" * 2**20)
    assert time.thread_time() - start < 10 * MATCH_TIMEOUT_S
    assert reading.feed("Hello").content == "Hello"


OBJECT = '[TOOL_CALLS]{"arguments":'
NO_CALLS = {
    "objects that never end": (OBJECT * 4000, 4),
    "objects within objects": (OBJECT * 1000 + "}" * 1000, 26_000),
    "small objects within objects": ((OBJECT * 80 + "}" * 80) * 40, 4),
    "objects without arguments": ('[TOOL_CALLS]{"x":' * 4000, 68_000),
}


@pytest.mark.parametrize("name", NO_CALLS)
def test_a_mark_that_json_may_contain_is_not_read_again_and_again(name: str) -> None:
    """The mark of ``mistral_list`` may be within an object; the end of the answer is timed, too."""
    text, size = NO_CALLS[name]
    for _ in range(3):  # the machine may be busy
        content, slowest = slowest_piece(text, size)
        assert content.count("{") == text.count("{")
        assert content.endswith(text[-20:])
        if slowest < 1.5 * READING_S:
            return
    pytest.fail(f"one piece took {slowest:.3f} s")


def slowest_piece(text: str, size: int) -> tuple[str, float]:
    """Return the content of an answer, and the most processor time of a piece or of the end."""
    reading, deltas, used = reader("mistral_list"), [], []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for read in [*(functools.partial(reading.feed, piece) for piece in pieces), reading.finish]:
        before = time.thread_time()
        deltas.append(read())
        used.append(time.thread_time() - before)
    return ResponseDelta.joined(deltas).content, max(used)


def test_the_end_of_an_answer_has_the_same_limit() -> None:
    """What is not read within it is content."""
    reading, text = reader("mistral_list"), OBJECT * 100
    first = reading.feed(text)
    reading._time.left_s = 0.0
    late = ResponseDelta.joined([first, reading.finish()])
    assert late.content == text.removeprefix("[TOOL_CALLS]")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object"] * 5000},
        {"anyOf": [{"type": "object"}] * 5000},
        {"enum": [{}] * 5000},
        {"allOf": [{"$ref": f"#/properties/a/allOf/{i}"} for i in range(5000)]},
    ],
    ids=["types", "union", "values", "references"],
)
def test_a_schema_with_many_types_takes_no_time(schema: dict[str, Any]) -> None:
    """Each type is tried once, and no more than some parts of a schema are looked at."""
    parameters = {"properties": {"a": schema, "b": {"$ref": "#/properties/a"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    reading = ResponseReader(ResponseFormat("qwen3_coder"), tools=tools)
    value = "[1, " * 7500
    call = f"<tool_call><function=f><parameter=a>{value}</parameter><parameter=b>{value}"
    start = time.thread_time()
    deltas = [reading.feed(f"{call}</parameter></function></tool_call>"), reading.finish()]
    assert time.thread_time() - start < 0.1
    assert json.loads(ResponseDelta.joined(deltas).tool_calls[0].arguments)["a"] == value
    assert types_of(schema) == types_of({"type": "object"})[: len(types_of(schema))]
