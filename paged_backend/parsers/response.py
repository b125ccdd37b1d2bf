"""Reads an answer as it arrives: text, reasoning and tool calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paged_backend.parsers.answer import AnswerReader
from paged_backend.parsers.delta import ResponseDelta
from paged_backend.parsers.formats import ResponseFormat
from paged_backend.parsers.harmony import HarmonyReader
from paged_backend.parsers.output import Output
from paged_backend.parsers.reading_time import ReadingTime
from paged_backend.parsers.schema_values import ParameterTypes
from paged_backend.parsers.source import OutOfTimeError, Reading, UnreadText
from paged_backend.parsers.template import TemplateReader


class _Reader(Protocol):
    """Reads an answer in one kind of format."""

    def add(self, text: str, deadline_s: float = math.inf) -> None:
        """Read new text, up to a moment of this thread's processor time."""

    def end(self, *, is_cut: bool, deadline_s: float = math.inf) -> None:
        """Read what was held back, up to a moment of this thread's processor time."""

    def stop(self) -> None:
        """Take the rest of the answer as content."""


class ResponseReader:
    """Reads one completion.

    Args:
        format: format of the model's answers.
        tools: the tools of the request, as OpenAI's JSON; without any, no calls are looked for.
        prefix: the end of the prompt, which may have begun the answer, as with ``<think>``.
        is_continued: the answer goes on with the last message of the prompt.
        reading_time: limits the work on all completions of the request.
    """

    def __init__(
        self,
        format: ResponseFormat,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: str = "",
        is_continued: bool = False,
        reading_time: ReadingTime | None = None,
    ) -> None:
        self._time = reading_time or ReadingTime()
        self._output = Output(format.tools.id_length if format.tools is not None else 24)
        types = ParameterTypes(tools) if tools else None
        self._reader: _Reader
        if format.template is not None:
            can_read = self._time.is_left
            with self._time.spend():
                self._reader = TemplateReader(
                    format.template, self._output, prefix if can_read else "", types
                )
            if not can_read:  # what the prompt has begun is not known
                self._reader.stop()
        else:
            reasoning = format.reasoning
            in_reasoning = reasoning is not None and reasoning.is_open(
                prefix, is_continued=is_continued
            )
            self._reader = _FormatReader(format, self._output, types, in_reasoning=in_reasoning)
        self._output.take()  # what the prompt has begun does not belong to the answer

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far."""
        return self._output.num_calls

    @property
    def is_inside_call(self) -> bool:
        """True if the last call is not complete."""
        return self._output.is_inside_call

    def feed(self, text: str) -> ResponseDelta:
        """Return what new text of the model adds."""
        self._time.earn(len(text))
        with self._time.spend() as deadline_s:
            self._reader.add(text, deadline_s)
        if not self._time.is_left:
            self._reader.stop()
        return self._output.take()

    def finish(self, *, is_cut: bool = False) -> ResponseDelta:
        """Return what was held back, at the end of the answer.

        Args:
            is_cut: something other than the model has ended the answer. Then what may be the
                beginning of a mark or of a call, or the white space before one, is dropped.
        """
        with self._time.spend() as deadline_s:
            self._reader.end(is_cut=is_cut, deadline_s=deadline_s)
        if not is_cut:
            self._output.finish()
        return self._output.take()


class _FormatReader:
    """Reads an answer in one of the formats that are known."""

    def __init__(
        self,
        format: ResponseFormat,
        output: Output,
        types: ParameterTypes | None,
        *,
        in_reasoning: bool,
    ) -> None:
        self._source = UnreadText()
        self._output = output
        reader = HarmonyReader if format.is_harmony else AnswerReader
        reading = reader(self._source, output, format, types)
        self._reading: Reading[None] | None = reading.read(in_reasoning=in_reasoning)
        self._advance()

    def add(self, text: str, deadline_s: float = math.inf) -> None:
        """Read new text."""
        if self._reading is None:
            self._output.content(text)
            return
        self._source.deadline_s = deadline_s
        self._source.add(text)
        self._advance()

    def end(self, *, is_cut: bool, deadline_s: float = math.inf) -> None:
        """Read what was held back."""
        self._source.deadline_s = deadline_s
        self._source.end(is_cut=is_cut)
        self._advance()

    def stop(self) -> None:
        """Take the rest of the answer as content."""
        if self._reading is not None:
            self._reading = None
            self._output.begin_part()
            self._output.content(self._source.rest)

    def _advance(self) -> None:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
            except OutOfTimeError:
                self.stop()
