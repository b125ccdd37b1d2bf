"""Reads answers in which reasoning and tool calls are marked; the rest is content."""

from __future__ import annotations

from paged_backend.parsers.calls import Calls
from paged_backend.parsers.formats import CallMarks, JsonCalls, ResponseFormat
from paged_backend.parsers.json_text import ARGUMENTS_KEYS, TYPE_OF_CALL
from paged_backend.parsers.literal_calls import NAME
from paged_backend.parsers.literals import SPACE
from paged_backend.parsers.output import Output
from paged_backend.parsers.schema_values import ParameterTypes
from paged_backend.parsers.source import NotACallError, Reading, UnreadText


class AnswerReader:
    """Reads an answer.

    Args:
        source: the answer.
        output: takes what is found.
        format: format of the answer.
        types: types of the tools' parameters; None if calls are text.
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
        reasoning, tools = format.reasoning, format.tools
        self._reasoning = ("", "")
        if reasoning is not None:
            self._reasoning = (reasoning.begin.strip(), reasoning.end.strip())
        self._may_repeat_begin = reasoning is not None and reasoning.is_implied
        self._is_over = False  # the mark at the end of the reasoning was read
        self._marks, self._calls = CallMarks(), None
        self._call_in_reasoning = ""  # the mark of calls that end reasoning
        self._begins_with_calls = False
        if tools is not None and types is not None:
            self._marks = tools.marks
            self._calls = Calls(source, output, tools, types)
            self._begins_with_calls = bool(tools.opening)
            if reasoning is not None and reasoning.ends_at_calls:
                self._call_in_reasoning = tools.marks.open
            self._is_json = isinstance(tools.syntax, JsonCalls)

    def read(self, *, in_reasoning: bool) -> Reading[None]:
        """Read the answer.

        A lone mark at the end of reasoning is dropped: what is before it was sent as content.

        Args:
            in_reasoning: the answer begins within the reasoning.
        """
        source, output, marks = self._source, self._output, self._marks
        if in_reasoning and self._may_repeat_begin:
            yield from self._skip_begin()
        known = (
            *(self._reasoning[0], marks.open, marks.bare),
            *(marks.list_open, marks.list_close),
        )
        mark = self._reasoning[0] if in_reasoning else ""
        is_start = True
        while True:
            if mark and mark == self._reasoning[0]:
                mark = yield from self._read_reasoning()
                is_start = True
            if mark and mark in (marks.open, marks.bare):
                mark = yield from self._read_calls(mark)
            if mark and mark == marks.list_close:
                yield from source.until((), output.drop)
            if is_start and self._begins_with_calls and (yield from self._calls_are_next()):
                yield from self._read_calls(marks.open)
            is_start = False
            end = "" if self._is_over else self._reasoning[1]
            watched = tuple(filter(None, (*known, end)))
            mark = yield from source.until(watched, output.content)
            if not mark:
                return
            if mark == end:
                self._is_over = True
                yield from source.run(SPACE)

    def _skip_begin(self) -> Reading[None]:
        """Take the mark of reasoning that has begun without it."""
        source = self._source
        source.begin_head()
        try:
            yield from source.run(SPACE)
            yield from source.expect(self._reasoning[0])
        except NotACallError:
            source.reject_head()
        else:
            source.accept_head()

    def _read_reasoning(self) -> Reading[str]:
        """Read reasoning; returns the mark of calls if one ends it."""
        source, output = self._source, self._output
        call, end = self._call_in_reasoning, self._reasoning[1]
        watched = (call, end) if call else (end,)
        output.begin_part()
        mark = yield from source.until(watched, output.reasoning)
        while mark and mark == call and not (yield from self._call_is_next()):
            if not source.is_cut:
                output.reasoning(mark)
            mark = yield from source.until(watched, output.reasoning)
        output.end_reasoning()
        self._is_over = mark == end
        return "" if self._is_over else mark

    def _call_is_next(self) -> Reading[bool]:
        """Return True if a mark of calls in the reasoning is not just mentioned."""
        source = self._source
        source.begin_head()
        try:
            yield from source.run(SPACE)
            yield from source.expect(self._marks.first)
        except NotACallError:
            source.reject_head()
            return False
        source.rewind()
        return True

    def _read_calls(self, mark: str) -> Reading[str]:
        """Read calls after their first mark; returns the mark after them."""
        assert self._calls is not None
        if mark != self._marks.open:
            yield from self._calls.read_bare()
            return ""
        while mark == self._marks.open:
            self._output.begin_part()
            mark = yield from self._calls.read()
            if not mark:
                break
        return mark

    def _calls_are_next(self) -> Reading[bool]:
        """Return True if an answer begins with calls; takes a mark before them."""
        source = self._source
        source.begin_head()
        try:
            yield from source.run(SPACE)
            if (yield from source.take(self._marks.start)):
                source.accept_head()
                return True
            yield from source.expect("{" if self._is_json else "[")
            yield from source.run(SPACE)
            if self._is_json:
                yield from self._key_of_call()
            elif (yield from source.run(NAME)):
                yield from source.expect("(")
            else:
                source.refuse()
        except NotACallError:
            source.reject_head()
            return False
        source.rewind()
        return True

    def _key_of_call(self) -> Reading[None]:
        """Take the first key of a call, and the value of its type.

        Raises:
            NotACallError: something else is next.
        """
        source = self._source
        for key in ("name", *ARGUMENTS_KEYS):
            if (yield from source.take(f'"{key}"')):
                return
        for literal in TYPE_OF_CALL:
            yield from source.expect(literal)
            yield from source.run(SPACE)
