"""Reads answers by a checkpoint's own ``response_template``, within limits of time.

A ``response_template`` is by the author of the model: its regular expressions may take any time.
The rules are the same as in transformers' ``ResponseParser``, which has no limits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paged_backend.parsers.output import Output
from paged_backend.parsers.schema_values import ParameterTypes
from paged_backend.parsers.source import MAX_HEAD_LENGTH
from paged_backend.parsers.template_values import calls_of, check_field
from paged_backend.values.errors import ConfigError

MATCH_TIMEOUT_S = 0.02  # time of one search for one regular expression
PIECE_TIMEOUT_S = 0.1  # time of all searches in a piece of an answer, or in the end of a prompt
MAX_PREFIX_LENGTH = 65536  # characters at the end of a prompt in which an answer may have begun
_CONTEXT_LENGTH = 4096  # characters before a match that it may look at

CALL_FIELD, CONTENT_FIELD = "tool_calls", "content"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class _Mark(NamedTuple):
    """The beginning or the end of a region."""

    field: Any
    is_open: bool
    match: Any

    @property
    def order(self) -> tuple[int, int, bool, str]:
        """The first mark applies; of those, the longest."""
        start, end = self.match.span()
        return start, start - end, not self.is_open, self.field.name


def load_template(template: Mapping[str, Any]) -> Any:
    """Return transformers' ``ResponseTemplate``; the first call takes over a second.

    Raises:
        ConfigError: the template cannot be used.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        loaded = load_response_template(dict(template))
        for field in loaded.fields.values():
            check_field(field)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"response_template cannot be used: {error}") from error
    return loaded


class TemplateReader:
    """Reads one answer. After an error or at a limit, the rest of the answer is content.

    Args:
        template: transformers' ``ResponseTemplate``.
        output: takes what is found.
        prefix: the end of the prompt, which may have begun the answer.
        types: types of the tools' parameters; None if calls are text.
    """

    def __init__(
        self, template: Any, output: Output, prefix: str, types: ParameterTypes | None
    ) -> None:
        self._template = template
        self._implicit = template.fields.get(template.implicit)
        self._output = output
        self._types = types
        self._text = ""
        self._position = 0
        self._field: Any = self._implicit  # field of the open region; None outside of all
        self._captures: dict[str, str] = {}
        self._call: list[str] = []  # the text of the open region, if it is a call
        self._is_over = False
        self.add(self._begun(prefix[-MAX_PREFIX_LENGTH:]))

    def _begun(self, prefix: str) -> str:
        """Return what a prompt has begun of the answer."""
        end = 0
        try:
            for match in self._template.start_anchor_re.finditer(prefix, timeout=MATCH_TIMEOUT_S):
                end = match.end()
        except TimeoutError:
            return ""
        return prefix[end:]

    def add(self, text: str, deadline_s: float = math.inf) -> None:
        """Read new text, up to a moment of this thread's processor time."""
        if self._is_over:
            self._output.content(text)
            return
        start = self._position - _CONTEXT_LENGTH
        if start > _CONTEXT_LENGTH:
            self._text = self._text[start:]
            self._position -= start
        self._text += text
        self._read(deadline_s, is_end=False)

    def end(self, *, is_cut: bool, deadline_s: float = math.inf) -> None:
        """Read what was held back; at the end of a cut answer, drop it."""
        if self._is_over:
            return
        if is_cut:
            self._text = self._text[: self._position]
            return
        self._read(deadline_s, is_end=True)
        if not self._is_over:
            self._put(len(self._text))
            self._close()

    def stop(self) -> None:
        """Take the rest of the answer as content."""
        if not self._is_over:
            self._is_over = True
            self._output.begin_part()
            self._output.content("".join(self._call) + self._text[self._position :])
            self._call.clear()

    def _read(self, deadline_s: float, *, is_end: bool) -> None:
        deadline_s = min(deadline_s, time.thread_time() + PIECE_TIMEOUT_S)
        try:
            while not self._is_over and (mark := self._next(is_end)):
                if time.thread_time() > deadline_s:
                    raise TimeoutError
                self._put(mark.match.start())
                self._position = mark.match.end()
                captures = {k: v for k, v in mark.match.groupdict().items() if v is not None}
                if mark.is_open:
                    self._close()
                    self._open(mark.field, captures)
                else:
                    self._captures |= captures
                    self._close()
        except TimeoutError:
            self.stop()

    def _next(self, is_end: bool) -> _Mark | None:
        """Return the next mark that is certain; the text before an uncertain one is taken."""
        held = len(self._text)
        found: list[_Mark] = []
        for field, is_open in self._watched():
            match = _search(_pattern(field, is_open), self._text, self._position, is_end)
            if match is None:
                continue
            mark = _Mark(field, is_open, match)
            if not is_end and (match.partial or self._may_grow(mark)):
                held = min(held, match.start())
            elif is_open or match.end() > self._position:  # an empty end would be found again
                found.append(mark)
        best = min(found, key=lambda mark: mark.order, default=None)
        if best is not None and best.match.start() < held:
            return best
        if not is_end:
            self._put(held if len(self._text) - held <= MAX_HEAD_LENGTH else len(self._text))
        return None

    def _watched(self) -> Iterator[tuple[Any, bool]]:
        if self._field is not None and self._field is not self._implicit:
            yield self._field, False
            return
        for field in self._template.fields.values():
            if field.name != CALL_FIELD or self._types is not None:
                yield field, True
        if self._implicit is not None:
            yield self._implicit, False

    def _may_grow(self, mark: _Mark) -> bool:
        """Return True if more text may change a match."""
        match, field = mark.match, mark.field
        is_literal = (field.open_literals if mark.is_open else field.close_literals) is not None
        if match.end() == len(self._text):
            can_extend = (
                field.open_literal_can_extend if mark.is_open else field.close_literal_can_extend
            )
            return match.start() == match.end() or not is_literal or bool(can_extend)
        if is_literal:
            return False
        pattern = _pattern(field, mark.is_open)
        again = pattern.match(self._text + "\0", match.start(), timeout=MATCH_TIMEOUT_S)
        return again is None or (again.span(), again.groupdict()) != (
            match.span(),
            match.groupdict(),
        )

    def _put(self, end: int) -> None:
        """Take the text up to a position as part of the open region."""
        text = self._text[self._position : end]
        self._position = max(self._position, end)
        name = None if self._field is None else self._field.name
        if name == CONTENT_FIELD:
            self._output.content(text)
        elif name in _REASONING_FIELDS:
            self._output.reasoning(text)
        elif name == CALL_FIELD:
            self._call.append(text)

    def _open(self, field: Any, captures: dict[str, str]) -> None:
        self._field, self._captures = field, captures
        if field.name == CALL_FIELD or field.name in _REASONING_FIELDS:
            self._output.begin_part()

    def _close(self) -> None:
        field, self._field = self._field, self._implicit
        if field is not None and field.name in _REASONING_FIELDS:
            self._output.end_reasoning()
        if field is None or field.name != CALL_FIELD or self._types is None:
            return
        if field is self._implicit and not self._call:
            return
        try:
            calls = calls_of("".join(self._call), field, self._captures, self._types)
        except (ValueError, KeyError, TypeError, RecursionError, TimeoutError):
            self.stop()
            return
        self._call.clear()
        for name, arguments in calls:
            self._output.whole_call(name, arguments)


def _pattern(field: Any, is_open: bool) -> Any:
    return field.open_re if is_open else field.close_re


def _search(pattern: Any, text: str, position: int, is_end: bool) -> Any:
    """Return the next match, which may be partial unless this is the end of the answer."""
    if pattern is None:
        return None
    return pattern.search(text, position, partial=not is_end, timeout=MATCH_TIMEOUT_S)
