"""Limits the processor time that the answers of one request may take to read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

# Processor time for the answers of a request, beyond which the rest of them is text. The readers
# take a few microseconds a character. Texts full of possible calls can take more, and so can a
# checkpoint's regular expressions.
READING_S = 0.25
READING_S_PER_CHARACTER = 50e-6
# Long answers save up time that a pause of the interpreter may take; the ends of all completions
# could use it at once.
MAX_SAVED_S = 1.0


class ReadingTime:
    """The processor time that is left for the completions of one request.

    New text adds to it, up to MAX_SAVED_S. A block takes READING_S of it at most, because the other
    requests wait meanwhile.
    """

    def __init__(self) -> None:
        self.left_s = READING_S

    @property
    def is_left(self) -> bool:
        """Return False if the rest of the answers is text."""
        return self.left_s > 0

    def earn(self, num_characters: int) -> None:
        """Add the time for new text."""
        self.left_s = min(self.left_s + READING_S_PER_CHARACTER * num_characters, MAX_SAVED_S)

    @contextlib.contextmanager
    def spend(self) -> Iterator[float]:
        """Measure the time of a block; gives the moment of this thread's time when it must end."""
        started_s = time.thread_time()
        try:
            yield started_s + min(self.left_s, READING_S)
        finally:
            self.left_s -= time.thread_time() - started_s
