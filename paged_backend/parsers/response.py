"""Reads an answer as it arrives: text, reasoning and tool calls."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paged_backend.parsers.calls import CallError, CallPart, CallReader, call_reader
from paged_backend.parsers.delta import ResponseDelta, ToolCallDelta
from paged_backend.parsers.formats import CALL_FIELD, CONTENT_FIELD, ResponseFormat

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Pieces of text that end where a call or its arguments may begin.
_PIECES = re.compile(r'[^>\].":{]*[>\].":{]|[^>\].":{]+')
_ANY_PROBLEM = (ValueError, KeyError, TypeError, RecursionError)  # of transformers' parser


def load_parser() -> Any:
    """Return transformers' ``ResponseParser``; the first call takes over a second."""
    from transformers.utils.chat_parsing import ResponseParser

    return ResponseParser


class ResponseReader:
    """Reads one completion with transformers' ``ResponseParser``.

    Args:
        format: of the model's answers.
        tools: the tools of the request, as OpenAI's JSON; without any, no calls are looked for.
        prefix: what the prompt has begun of the answer, such as ``<think>``.
    """

    def __init__(
        self, format: ResponseFormat, *, tools: Sequence[Mapping[str, Any]] = (), prefix: str = ""
    ) -> None:
        template = format.response_template(with_tools=bool(tools))
        self._parser = load_parser()(template, prefix=prefix, tools=list(tools))
        tool_format = format.tools if format.template is None else None
        self._syntax = tool_format.syntax if tool_format is not None else None
        self._has_tools = bool(tools)
        self._id_length = format.tools.id_length if format.tools is not None else 24
        self._calls: CallReader | None = None  # of the region that is open
        self._call_text = ""  # of that region
        self._num_calls = 0
        self._content = _Text()
        self._reasoning = _Text()
        self._is_broken = False
        self._read(self._parser.initial_events, ResponseDelta())

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far."""
        return self._num_calls

    def feed(self, text: str) -> ResponseDelta:
        """Return what new text of the model adds."""
        delta = ResponseDelta()
        for piece in _PIECES.findall(text) if self._has_tools else [text]:
            self._feed(piece, delta)
        return delta

    def _feed(self, text: str, delta: ResponseDelta) -> None:
        if self._is_broken:
            delta.content += self._content.add(text)
            return
        if self._calls is not None and self._calls.is_inside:
            # The arguments may contain the text that ends a call, which the parser must not see.
            length = self._calls.take(text)
            self._add([CallPart(None, text[:length])], delta)
            text = text[length:]
        try:
            self._read(self._parser.feed(text), delta)
        except _ANY_PROBLEM:
            self._break(delta)

    def finish(self) -> ResponseDelta:
        """Return what was held back, at the end of the answer."""
        delta = ResponseDelta()
        if not self._is_broken:
            try:
                self._read(self._parser.finalize()[1], delta)
            except _ANY_PROBLEM:
                self._break(delta)
        delta.content += self._content.finish()
        return delta

    def _read(self, events: Iterable[Mapping[str, Any]], delta: ResponseDelta) -> None:
        for event in events:
            name = event["field"]
            if name == CALL_FIELD:
                self._read_call(event, delta)
            elif name in _REASONING_FIELDS:
                self._read_reasoning(event, delta)
            elif name == CONTENT_FIELD and event["type"] == "region_chunk":
                delta.content += self._content.add(event["text"])

    def _read_reasoning(self, event: Mapping[str, Any], delta: ResponseDelta) -> None:
        match event["type"]:
            case "region_open":
                self._content.leave()
                self._reasoning.leave()
            case "region_chunk":
                delta.reasoning += self._reasoning.add(event["text"])
            case "region_close":
                self._reasoning.leave()

    def _read_call(self, event: Mapping[str, Any], delta: ResponseDelta) -> None:
        match event["type"]:
            case "region_open":
                self._content.leave()
                self._calls, self._call_text = call_reader(self._syntax), ""
            case "region_chunk":
                assert self._calls is not None
                self._call_text += event["text"]
                self._add(self._calls.feed(event["text"]), delta)
            case "region_close":
                assert self._calls is not None
                try:
                    self._add(self._calls.close(event["value"]), delta)
                except CallError as error:
                    delta.content += self._content.add(str(error))
                self._calls = None

    def _add(self, parts: Iterable[CallPart], delta: ResponseDelta) -> None:
        for name, arguments in parts:
            if name is not None:
                self._num_calls += 1
            index = self._num_calls - 1
            call_id = None if name is None else self._new_id()
            delta.add_call(ToolCallDelta(index, arguments, call_id, name))

    def _new_id(self) -> str:
        number = uuid.uuid4().hex
        # Templates that demand short ids take no other characters.
        return number[: self._id_length] if self._id_length < 16 else f"call_{number[:24]}"

    def _break(self, delta: ResponseDelta) -> None:
        """Take a call that cannot be read, and everything after it, as text."""
        self._is_broken = True
        if self._calls is not None:
            delta.content += self._content.add(self._call_text)


class _Text:
    """Text without the white space between it and other parts of the answer."""

    def __init__(self) -> None:
        self._held = ""  # white space that may be the last
        self._at_start = False

    def add(self, text: str) -> str:
        """Return the text that is certain to belong to the answer."""
        text = self._held + text
        if self._at_start:
            text = text.lstrip()
        certain = text.rstrip()
        self._held = text[len(certain) :]
        if certain:
            self._at_start = False
        return certain

    def leave(self) -> None:
        """Drop white space at the end, and at the beginning of what comes next."""
        self._held = ""
        self._at_start = True

    def finish(self) -> str:
        """Return white space at the end of the answer."""
        held, self._held = self._held, ""
        return held
