"""The blocks of an answer, which are reasoning, texts and tool calls, as they begin and grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, TypeAlias

from paged_client import Answer, Chunk, ToolCallDelta
from paged_client.gateway.errors import ApiError

Kind: TypeAlias = Literal["reasoning", "text", "tool_call"]

_COMPLETE = ("stop", "tool_calls", "length")


@dataclass(slots=True)
class Block:
    """A part of an answer; ``parts`` are its text, or the arguments of its call, so far."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""  # name of the called tool
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text or arguments so far."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """What happens to a block; ``text`` is what it grows by."""

    action: Literal["begin", "grow", "end"]
    block: Block
    text: str = ""


class BlockReader:
    """Converts the chunks of one completion into events of blocks, one block at a time."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._num_blocks = 0

    def read(self, chunk: Chunk) -> Iterator[BlockEvent]:
        """Yield the events of a chunk; the last chunk ends the last block."""
        # Several chunks may have become one. Arguments without a new call then belong to the call
        # that was open before the chunk.
        rest = list(takewhile(lambda part: part.id is None, chunk.tool_calls))
        yield from self._calls(rest)
        yield from self._text("reasoning", chunk.reasoning)
        yield from self._text("text", chunk.text)
        yield from self._calls(chunk.tool_calls[len(rest) :])
        if chunk.finish_reason is not None:
            yield from self._end()

    def _text(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        yield from self._grow(text)

    def _calls(self, parts: Sequence[ToolCallDelta]) -> Iterator[BlockEvent]:
        for part in parts:
            if part.id is not None:
                yield from self._begin("tool_call", part.id, part.name or "")
            if part.arguments:
                yield from self._grow(part.arguments)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[BlockEvent]:
        yield from self._end()
        self._open = Block(kind, self._num_blocks, call_id, name)
        self._num_blocks += 1
        yield BlockEvent("begin", self._open)

    def _grow(self, text: str) -> Iterator[BlockEvent]:
        assert self._open is not None
        self._open.parts.append(text)
        yield BlockEvent("grow", self._open, text)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEvent("end", self._open)
        self._open = None


def blocks_of(answer: Answer) -> list[Block]:
    """Return the blocks of a whole answer."""
    blocks: list[Block] = []
    if answer.reasoning:
        blocks.append(Block("reasoning", 0, parts=[answer.reasoning]))
    if answer.text:
        blocks.append(Block("text", len(blocks), parts=[answer.text]))
    for call in answer.tool_calls:
        blocks.append(Block("tool_call", len(blocks), call.id, call.name, [call.arguments]))
    return blocks


def check_end(finish_reason: str) -> None:
    """Raise ApiError if the engine ended an answer that is not complete."""
    if finish_reason not in _COMPLETE:
        message = f"{finish_reason}: the server ended the answer before it was complete"
        raise ApiError(500, message, code=finish_reason)
