"""Reads tool calls while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from paged_backend.parsers.formats import (
    CallSyntax,
    GemmaCalls,
    JsonCalls,
    NamedCalls,
    PythonicCalls,
    ToolFormat,
    XmlCalls,
)
from paged_backend.parsers.json_text import (
    ARGUMENTS_KEYS,
    TYPE_OF_CALL,
    read_object_call,
    read_string,
    read_value,
)
from paged_backend.parsers.literal_calls import NAME, read_gemma_call, read_python_calls
from paged_backend.parsers.literals import SPACE, escaped
from paged_backend.parsers.output import Output
from paged_backend.parsers.schema_values import ParameterTypes, as_json
from paged_backend.parsers.source import NotACallError, Reading, UnreadText

_BETWEEN = re.compile(r"[\s;,\[\]}]*")  # JSON calls
_IN_TAG = re.compile(r"[^<>\n]*")
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


class Calls:
    """Reads the calls of one format.

    Args:
        source: the answer.
        output: takes what is found.
        format: format of the calls.
        types: types of the tools' parameters.
    """

    def __init__(
        self, source: UnreadText, output: Output, format: ToolFormat, types: ParameterTypes
    ) -> None:
        self._source = source
        self._output = output
        self._marks = marks = format.marks
        self._types = types
        self._ends = tuple(mark for mark in (marks.close, marks.open, marks.list_close) if mark)
        self._read = self._reader(format.syntax)

    def read(self) -> Reading[str]:
        """Read what follows the mark that opens calls, up to the next mark.

        Text that is not a call is content. Text between a call and the mark at its end is dropped.

        Returns:
            The mark; empty at the end of the answer, and after a call without a mark at its end.
        """
        source, output, bare = self._source, self._output, self._marks.bare
        while True:
            try:
                yield from self._read()
            except NotACallError as error:
                output.content(error.text)
                source.reject_head()
                return (yield from source.until(self._ends, output.content))
            if not self._marks.close:
                return ""
            ends = (*self._ends, bare) if bare else self._ends
            mark = yield from source.until(ends, output.drop)
            if not mark or mark != bare:
                return mark
            source.unread(mark)  # another call after the same mark

    def read_bare(self) -> Reading[None]:
        """Read a call without the mark that opens calls; its own beginning was read."""
        source, bare = self._source, self._marks.bare
        source.unread(bare)
        try:
            yield from self._read()
        except NotACallError:
            source.reject_head()
            if (yield from source.take(bare)):
                self._output.content(bare)
            return
        yield from source.run(SPACE)
        yield from source.take(self._marks.close)

    def _reader(self, syntax: CallSyntax) -> Callable[[], Reading[None]]:
        source, output = self._source, self._output
        match syntax:
            case JsonCalls():
                return self._json_calls
            case NamedCalls():
                return lambda: self._named_call(syntax)
            case PythonicCalls():
                return lambda: read_python_calls(source, output, self._marks.end)
            case GemmaCalls(quote):
                return lambda: read_gemma_call(source, output, self._types, quote)
            case XmlCalls():
                return self._xml_call

    # --- JSON objects with a name and arguments -------------------------------------------------

    def _json_calls(self) -> Reading[None]:
        """Read objects; several may follow each other or form a list."""
        source, output = self._source, self._output
        while True:
            yield from source.run(_BETWEEN)
            if not (yield from source.peek()):
                return
            source.begin_head()
            try:
                name = yield from self._json_head()
            except NotACallError:
                source.reject_head()
                yield from self._whole_json_call()
            else:
                source.accept_head()
                output.call(name)
                yield from read_arguments(source, output)

    def _json_head(self) -> Reading[str]:
        """Read the beginning of an object up to its arguments, and return the name."""
        source = self._source
        yield from source.expect("{")
        yield from source.run(SPACE)
        has_type = yield from source.take(TYPE_OF_CALL[0])
        before = (*TYPE_OF_CALL[1:], ",") if has_type else ()
        yield from source.run(SPACE)
        for literal in (*before, '"name"', ":"):
            yield from source.expect(literal)
            yield from source.run(SPACE)
        name = yield from read_string(source)
        yield from source.run(SPACE)
        yield from source.expect(",")
        yield from source.run(SPACE)
        key = yield from read_string(source)
        yield from source.run(SPACE)
        yield from source.expect(":")
        yield from source.run(SPACE)
        if key not in ARGUMENTS_KEYS or (yield from source.peek()) != "{":
            source.refuse()
        return name

    def _whole_json_call(self) -> Reading[None]:
        """Read a call with its arguments before its name, or without a name."""
        source = self._source
        if (yield from source.peek()) != "{":
            source.refuse()
        call = yield from read_object_call(source, self._types.has)
        if call is None:
            source.refuse()
        self._output.whole_call(*call)

    # --- a name, and then a JSON object ---------------------------------------------------------

    def _named_call(self, syntax: NamedCalls) -> Reading[None]:
        source, output = self._source, self._output
        source.begin_head()
        yield from source.run(SPACE)
        if syntax.kind:
            yield from source.expect(syntax.kind)
        name = yield from source.run(NAME)
        between: list[str] = []
        joint = syntax.middle.strip()
        mark = yield from source.until((joint, "{", *self._ends), between.append)
        if not name or not _is_id("".join(between).strip(), syntax.id_mark):
            source.refuse()
        if mark == joint:
            yield from source.run(SPACE)
            if (yield from self._is_at_end()):
                source.accept_head()
                output.whole_call(name, "{}")
                return
        elif mark == "{":
            source.unread(mark)
        if (yield from source.peek()) != "{":
            source.refuse()
        source.accept_head()
        output.call(name)
        yield from read_arguments(source, output)

    def _is_at_end(self) -> Reading[bool]:
        """Return True if a call that has no arguments ends here."""
        source = self._source
        for mark in self._ends:
            if (yield from source.take(mark)):
                source.unread(mark)
                return True
        return not (yield from source.peek()) and not source.is_cut

    # --- an element with elements for the parameters --------------------------------------------

    def _xml_call(self) -> Reading[None]:
        source, output = self._source, self._output
        source.begin_head()
        yield from source.run(SPACE)
        yield from source.expect(_FUNCTION)
        name = yield from source.run(_IN_TAG)
        yield from source.expect(">")
        if not name:
            source.refuse()
        source.accept_head()
        output.call(name)
        output.arguments("{")
        separator = ""
        marks = (_PARAMETER, _FUNCTION_END, *self._ends)
        while (mark := (yield from source.until(marks, output.drop))) == _PARAMETER:
            if (key := (yield from self._xml_key())) is not None:
                output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                yield from self._xml_value(self._types.of(name, key))
                separator = ", "
        if not mark and source.is_cut:
            return
        source.unread(mark if mark in self._ends else "")
        output.arguments("}")
        output.end_call()

    def _xml_key(self) -> Reading[str | None]:
        """Read a parameter's name; None if the tag does not end."""
        source = self._source
        source.begin_head()
        try:
            key = yield from source.run(_IN_TAG)
            yield from source.expect(">")
        except NotACallError:
            key = ""
        source.accept_head()
        yield from source.take("\n")
        return key or None

    def _xml_value(self, types: list[str]) -> Reading[None]:
        """Read a value; strings arrive as they are written."""
        source, output = self._source, self._output
        ends = (f"\n{_PARAMETER_END}", _PARAMETER_END)
        if set(types) <= {"string"}:
            output.arguments('"')
            end = yield from source.until(ends, lambda text: output.arguments(escaped(text)))
            value = '"'
        else:
            parts: list[str] = []
            end = yield from source.until(ends, parts.append)
            value = as_json("".join(parts), types)
        if end or not source.is_cut:
            output.arguments(value)


def read_arguments(source: UnreadText, output: Output) -> Reading[None]:
    """Read arguments that are a JSON object."""
    if (yield from read_value(source, output.arguments)):
        output.end_call()


def _is_id(text: str, id_mark: str) -> bool:
    """Return True if a call's id, or nothing, is between the name and the arguments."""
    if not text:
        return True
    return bool(id_mark) and text.startswith(id_mark) and text[len(id_mark) :].isalnum()
