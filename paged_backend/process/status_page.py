"""What an engine shows its front-ends at any moment: a page of memory that they share.

A look costs no message and no wait, so that a front-end can see an engine that hangs, and can
refuse a request before it has done anything for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Self

from paged_backend.outputs import QueueState

_NAME = "status"
_BEAT, _RETRY_AFTER_S, _QUEUE = 0, 1, 2
_NUM_VALUES = _QUEUE + len(QueueState._fields)


class StatusPage:
    """Integers of 64 bits; one process writes, others read.

    Each is written at once, but not all together: two that are read may be a step apart.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self._memory = mmap.mmap(descriptor, _NUM_VALUES * 8)
        finally:
            os.close(descriptor)
        self._values = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, run_dir: Path) -> Self:
        """A new page, in place of one that an engine before has left."""
        path = run_dir / _NAME
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, _NUM_VALUES * 8)
        return cls(descriptor)

    @classmethod
    def open(cls, run_dir: Path) -> Self:
        """The page of the engine that lives there."""
        return cls(os.open(run_dir / _NAME, os.O_RDWR))

    @property
    def beat(self) -> int:
        """Grows with each turn of the engine's loop; 0 until the first."""
        return self._values[_BEAT]

    @property
    def retry_after_s(self) -> int:
        """For how long the queue is likely to be full; 0 while it is not."""
        return self._values[_RETRY_AFTER_S]

    @property
    def queue(self) -> QueueState:
        """How much waits."""
        return QueueState(*self._values[_QUEUE:])

    def write(self, queue: QueueState, retry_after_s: int) -> None:
        """Show the present state; the next beat."""
        self._values[_BEAT] += 1
        self._values[_RETRY_AFTER_S] = retry_after_s
        for place, value in enumerate(queue, _QUEUE):
            self._values[place] = value

    def close(self) -> None:
        """Give the memory back."""
        self._values.release()
        self._memory.close()
