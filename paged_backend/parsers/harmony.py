"""Reads answers in OpenAI's format Harmony: messages, each with a header and a body.

The format is described in OpenAI's "Harmony response format"
(https://developers.openai.com/cookbook/articles/openai-harmony).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from paged_backend.parsers.calls import read_arguments
from paged_backend.parsers.formats import HARMONY_REASONING, ResponseFormat
from paged_backend.parsers.literals import SPACE
from paged_backend.parsers.output import Output
from paged_backend.parsers.schema_values import ParameterTypes
from paged_backend.parsers.source import NotACallError, Reading, UnreadText

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = (
    *("<|start|>", "<|channel|>"),
    *("<|constrain|>", "<|message|>"),
)
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
_OUTSIDE = (*_ENDS, _CONSTRAIN, _MESSAGE)
_IN_HEADERS = (*_OUTSIDE, "{")
_FUNCTIONS = "to=functions."  # the recipient of a call, and the name
_NAME = re.compile(r"[\w.-]+")


class HarmonyReader:
    """Reads an answer.

    Args:
        source: the answer.
        output: takes what is found.
        format: format of the answer.
        types: types of the tools' parameters; None if calls are dropped, because they are no
            content.
    """

    def __init__(
        self,
        source: UnreadText,
        output: Output,
        format: ResponseFormat,
        types: ParameterTypes | None,
    ) -> None:
        self._source = source
        self._output = output
        self._with_calls = types is not None
        self._with_reasoning = format.reasoning_parser == HARMONY_REASONING

    def read(self, *, in_reasoning: bool) -> Reading[None]:
        """Read the answer.

        Args:
            in_reasoning: the prompt has begun the reasoning.
        """
        source, output = self._source, self._output
        if in_reasoning:
            yield from self._read_reasoning()
        elif (yield from self._recipient_is_next()):
            yield from self._read_message("")
        while mark := (yield from source.until(_OUTSIDE, output.content)):
            if mark in (_START, _CHANNEL):
                yield from self._read_message(mark)

    def _recipient_is_next(self) -> Reading[bool]:
        """Return True if the answer goes on with a header that the prompt has begun."""
        source = self._source
        source.begin_head()
        try:
            yield from source.run(SPACE)
            yield from source.expect(_FUNCTIONS)
        except NotACallError:
            source.reject_head()
            return False
        source.rewind()
        return True

    def _read_message(self, mark: str) -> Reading[None]:
        """Read a message after its first mark; a text without the end of a header is content."""
        source, output = self._source, self._output
        source.begin_head()
        try:
            header = yield from self._read_header(mark)
            if _FUNCTIONS in header:
                yield from source.run(SPACE)
        except NotACallError:
            source.reject_head()
            return
        source.accept_head()
        name = _NAME.match(header.partition(_FUNCTIONS)[2])
        channel = header.rpartition(_CHANNEL)[2]
        if name is not None and self._with_calls:
            yield from self._read_call(name[0])
        elif "to=" in header or not header:  # also of a tool that is built into the model
            yield from self._read_body(output.drop)
        elif self._with_reasoning and channel.startswith("analysis"):
            yield from self._read_reasoning()
        else:
            yield from self._read_body(output.content)

    def _read_header(self, mark: str) -> Reading[str]:
        """Return a header with its marks; empty if the answer ends within it."""
        parts = [mark]
        while True:
            mark = yield from self._source.until(_IN_HEADERS, parts.append)
            if not mark:
                return ""
            is_more = mark == _CONSTRAIN or (mark == _CHANNEL and _CHANNEL not in parts)
            parts.append(mark)
            if not is_more:
                break
        header = "".join(parts)
        if mark == "{" and _FUNCTIONS in header:  # the arguments
            self._source.unread(mark)
        elif mark != _MESSAGE:
            self._source.refuse()
        return header

    def _read_call(self, name: str) -> Reading[None]:
        source, output = self._source, self._output
        output.begin_part()
        character = yield from source.peek()
        if character == "{":
            output.call(name)
            yield from read_arguments(source, output)
            yield from self._read_body(output.drop)
            return
        has_arguments = False

        def put(text: str) -> None:
            nonlocal has_arguments
            has_arguments = True
            output.content(text)

        yield from self._read_body(put)
        if not has_arguments and not source.is_cut:
            output.whole_call(name, "{}")

    def _read_reasoning(self) -> Reading[None]:
        self._output.begin_part()
        yield from self._read_body(self._output.reasoning)
        self._output.end_reasoning()

    def _read_body(self, put: Callable[[str], object]) -> Reading[None]:
        """Read up to the end of the message, or to the beginning of another one."""
        mark = yield from self._source.until(_ENDS, put)
        if mark in (_START, _CHANNEL):
            self._source.unread(mark)
