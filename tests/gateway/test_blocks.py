"""The blocks of an answer are the same, however the answer is cut into chunks."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_client import Answer, Chunk, CompletionBuilder, ToolCallDelta
from paged_client.gateway.backlog import Backlog
from paged_client.gateway.blocks import BlockReader, blocks_of
from paged_client.gateway.errors import ApiError
from paged_client.gateway.messages_api.format import MessagesFormat
from paged_client.gateway.responses_api.format import ResponsesFormat
from paged_client.gateway.responses_api.schema import ResponsesRequest


def a_chunk(text="", reasoning="", calls=(), reason=None, count=1) -> Chunk:
    return Chunk(
        text,
        tuple(range(count)),
        reason,
        num_input_tokens=7,
        num_output_tokens=count,
        num_cached_tokens=4,
        reasoning=reasoning,
        tool_calls=tuple(calls),
    )


# A model thinks, says something and calls two tools.
CHUNKS = [
    a_chunk(reasoning="Let me "),
    a_chunk(reasoning="see."),
    a_chunk("Looking"),
    a_chunk(" it up."),
    a_chunk(calls=[ToolCallDelta(0, '{"a"', "call_1", "first")]),
    a_chunk(calls=[ToolCallDelta(0, ": 1}")]),
    a_chunk(calls=[ToolCallDelta(1, "", "call_2", "second")]),
    a_chunk(calls=[ToolCallDelta(1, "{}")]),
    a_chunk(reason="tool_calls"),
]


def read(chunks):
    """Each block by its kind, call, name and text, in the order of their ends."""
    reader = BlockReader()
    events = [event for chunk in chunks for event in reader.read(chunk)]
    grown: dict[int, str] = {}
    for event in events:
        grown.setdefault(event.block.index, "")
        grown[event.block.index] += event.text
    ended = [event.block for event in events if event.action == "end"]
    assert [grown[block.index] for block in ended] == [block.text for block in ended]
    return [(block.kind, block.call_id, block.name, block.text) for block in ended]


def merged(sizes: list[int]) -> list[Chunk]:
    """The chunks as a slow reader gets them, several at once."""

    async def some(chunks):
        for chunk in chunks:
            yield chunk

    async def joined(chunks):
        async with Backlog([some(chunks)], limit=1000) as backlog:
            await asyncio.sleep(0.001)
            return [chunk async for _, chunk in backlog]

    result, rest = [], CHUNKS
    for size in sizes:
        part, rest = rest[:size], rest[size:]
        result += asyncio.run(joined(part)) if part else []
    return result + rest


EXPECTED = [
    ("reasoning", "", "", "Let me see."),
    ("text", "", "", "Looking it up."),
    ("tool_call", "call_1", "first", '{"a": 1}'),
    ("tool_call", "call_2", "second", "{}"),
]


@given(st.lists(st.integers(0, 4), max_size=4))
def test_blocks_do_not_depend_on_the_reader(sizes):
    assert read(merged(sizes)) == EXPECTED


def test_a_stream_has_the_blocks_of_the_whole_answer():
    builder = CompletionBuilder()
    for chunk in CHUNKS:
        builder.add(chunk)
    (answer,) = builder.build().answers
    blocks = blocks_of(answer)
    assert [(block.kind, block.call_id, block.name, block.text) for block in blocks] == EXPECTED


def test_arguments_after_a_merge_belong_to_the_call_before_it():
    call = a_chunk(calls=[ToolCallDelta(0, '{"a"', "call_1", "first")])
    later = a_chunk("Done.", calls=[ToolCallDelta(0, ": 1}")], reason="stop")
    assert read([call, later]) == [EXPECTED[2], ("text", "", "", "Done.")]


def test_an_empty_answer_has_no_blocks():
    assert read([a_chunk(reason="stop")]) == blocks_of(Answer("", (), "stop")) == []


def both_formats():
    return MessagesFormat("m"), ResponsesFormat("m", ResponsesRequest(input="x"))


def contents(events: bytes) -> list[dict]:
    lines = events.decode().splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [f["type"] for f in found]
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_a_stream_ends_with_what_the_whole_answer_says(number):
    builder = CompletionBuilder()
    for chunk in CHUNKS:
        builder.add(chunk)
    whole = both_formats()[number].whole([builder.build()])
    streaming = both_formats()[number]
    events = b"".join(streaming.events(0, chunk) for chunk in CHUNKS) + streaming.end()
    last = contents(events)[-1]
    if number == 0:
        delta = contents(events)[-2]
        assert delta["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
        assert delta["usage"] == whole["usage"]
        assert whole["usage"]["input_tokens"] == 3 and last == {"type": "message_stop"}
        return
    streamed = last["response"]
    for item in (*streamed["output"], *whole["output"]):
        assert item.pop("id") and item["status"] == "completed"
    assert streamed["output"] == whole["output"]
    assert streamed["usage"] == whole["usage"]


@pytest.mark.parametrize("number", [0, 1])
def test_an_answer_that_the_engine_gave_up_is_an_error(number):
    for reason in ("abort", "error"):
        builder = CompletionBuilder()
        builder.add(a_chunk("x", reason=reason))
        with pytest.raises(ApiError, match=reason):
            both_formats()[number].whole([builder.build()])
        with pytest.raises(ApiError, match=reason):
            both_formats()[number].events(0, a_chunk("x", reason=reason))


def test_a_failure_ends_a_stream_in_the_format_of_its_api():
    error = ApiError(503, "engine_dead: it ended", code="engine_dead")
    messages, responses = both_formats()
    assert contents(messages.failure(error)) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "engine_dead: it ended"}}
    ]
    responses.events(0, CHUNKS[2])
    told, failed = contents(responses.failure(error))
    assert (told["type"], told["code"]) == ("error", "engine_dead")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": error.args[0]}
    assert failed["sequence_number"] == told["sequence_number"] + 1
