"""The text of an answer as it arrives in pieces, for readers that are written as generators.

A reader that needs more text yields, and continues where it stopped. No text is looked at again for
each piece, but for a constant number of characters, so that the work for an answer is linear in its
length whatever the pieces are.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Generator
from typing import NoReturn, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader that yields when it needs more text, and returns T."""

MAX_HEAD_LENGTH = 4096  # characters that may wait for the decision between a call and text


class NotACallError(Exception):
    """The text since ``UnreadText.begin_head`` is not the beginning of a call.

    Args:
        text: taken already; it is text of the answer that is not read again.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.text = text


class OutOfTimeError(Exception):
    """The processor time for the answer is used up; its rest is text."""


class UnreadText:
    """The text that was not read yet. Each method that is a generator waits for text."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._head: int | None = None  # where the undecided text begins
        self._is_final = False
        self.is_cut = False  # something other than the model ended the answer
        self.deadline_s = math.inf  # by this thread's processor time

    def add(self, text: str) -> None:
        """Add a piece at the end."""
        done = self._position if self._head is None else self._head
        self._text = self._text[done:] + text
        self._position -= done
        self._head = None if self._head is None else 0

    def end(self, *, is_cut: bool) -> None:
        """Add nothing more.

        Args:
            is_cut: something other than the model has ended the answer.
        """
        self._is_final = True
        self.is_cut = is_cut

    @property
    def rest(self) -> str:
        """The text that was not read yet, or is undecided."""
        return self._text[self._position if self._head is None else self._head :]

    def unread(self, text: str) -> None:
        """Put the text that was taken last before the text that was not read yet."""
        start = self._position - len(text)
        if start >= 0:
            self._position = start
        else:  # some of it came with earlier pieces
            self._text = text + self._text[self._position :]
            self._position = 0
        self._check_time()

    # --- undecided text -------------------------------------------------------------------------

    def begin_head(self) -> None:
        """Keep the text from here on, because it may have to be read again as text."""
        self._head = self._position

    def accept_head(self) -> None:
        """Forget the kept text."""
        self._head = None

    def reject_head(self) -> None:
        """Go back to the beginning of the kept text, if any; drop it at the end of a cut answer."""
        if self.is_cut:
            self._position = len(self._text)
        elif self._head is not None:
            self._position = self._head
        self._head = None
        self._check_time()

    def rewind(self) -> None:
        """Go back to the beginning of the kept text."""
        assert self._head is not None
        self._position, self._head = self._head, None

    def refuse(self) -> NoReturn:
        """Raise NotACallError."""
        raise NotACallError

    def _check_time(self) -> None:
        """Raise an error after the deadline; only text that is read again can take long."""
        if time.thread_time() > self.deadline_s:
            raise OutOfTimeError

    def _check_head(self) -> None:
        if self._head is not None and self._position - self._head > MAX_HEAD_LENGTH:
            raise NotACallError

    # --- what readers read ----------------------------------------------------------------------

    def _more(self) -> Reading[bool]:
        """Wait for text; False at the end of the answer."""
        if self._is_final:
            return False
        yield
        return True

    def peek(self) -> Reading[str]:
        """Return the next character; empty at the end of the answer."""
        while self._position == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._position]

    def skip(self, length: int) -> None:
        """Skip characters that ``peek`` has returned."""
        self._position += length
        self._check_head()

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Take all next characters that match, and return them.

        Args:
            characters: matches any number of characters of one kind.

        Raises:
            NotACallError: too much text is undecided.
        """
        parts = []
        while True:
            match = characters.match(self._text, self._position)
            assert match is not None
            parts.append(match[0])
            self._position = match.end()
            self._check_head()
            if self._position < len(self._text) or not (yield from self._more()):
                return "".join(parts)

    def take(self, literal: str) -> Reading[bool]:
        """Take a literal if it is next; at the end of a cut answer, also its beginning."""
        while not self._text.startswith(literal, self._position):
            rest = self._text[self._position : self._position + len(literal)]
            if not literal.startswith(rest):
                return False
            if not (yield from self._more()):
                if self.is_cut:
                    self._position = len(self._text)
                return False
        self.skip(len(literal))
        return True

    def expect(self, literal: str) -> Reading[None]:
        """Take a literal.

        Raises:
            NotACallError: something else is next.
        """
        if not (yield from self.take(literal)):
            raise NotACallError

    def scan(self, find_end: Callable[[str, int], int]) -> Reading[str]:
        """Take a part of the text that has arrived, and return it.

        Args:
            find_end: returns the position after the part in a text, by the text and the position
                where the part begins.

        Returns:
            The part; empty at the end of the answer.
        """
        if not (yield from self.peek()):
            return ""
        start = self._position
        self._position = find_end(self._text, start)
        return self._text[start : self._position]

    def until(self, marks: tuple[str, ...], put: Callable[[str], object]) -> Reading[str]:
        """Take text up to the first mark, and the mark; at the end of a cut answer, drop the
        beginning of one.

        Args:
            marks: none is the beginning of another one.
            put: takes the text before the mark, as it arrives.

        Returns:
            The mark; empty at the end of the answer.

        Raises:
            NotACallError: too much text is undecided.
        """
        whole, beginning = _patterns(marks)
        window = max(map(len, marks), default=1) - 1
        while True:
            match = whole.search(self._text, self._position)
            if match is not None:
                self._put(match.start(), put)
                self._position = match.end()
                return match[0]
            near = max(self._position, len(self._text) - window)
            held = beginning.search(self._text, near)
            self._put(len(self._text) if held is None else held.start(), put)
            if not (yield from self._more()):
                rest = self._text[self._position :]
                self._position = len(self._text)
                if rest and not self.is_cut:
                    put(rest)
                return ""

    def _put(self, end: int, put: Callable[[str], object]) -> None:
        text = self._text[self._position : end]
        self._position = end
        self._check_head()
        if text:
            put(text)


@functools.cache
def _patterns(marks: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of a mark, and of the beginning of one at the end of a text."""
    beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
    longest_first = sorted(beginnings, key=len, reverse=True)
    return _any_of(marks, ""), _any_of(longest_first, r"\Z")


def _any_of(literals: list[str] | tuple[str, ...], end: str) -> re.Pattern[str]:
    if not literals:
        return re.compile(r"(?!)")
    return re.compile(f"(?:{'|'.join(map(re.escape, literals))}){end}")
