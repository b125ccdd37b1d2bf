"""A page of memory that an engine shares with its front ends, with its present state.

Reading it takes no message, so that a front end notices an engine that hangs, and can refuse a
request before it does any work for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Self

from paged_backend.values.outputs import QueueState

_NAME = "status"
_BEAT, _RETRY_AFTER_S, _QUEUE = 0, 1, 2
_NUM_VALUES = _QUEUE + len(QueueState._fields)


class StatusPage:
    """64-bit integers that one process writes and others read.

    Each integer is written atomically, but not all together: two of them may differ by a step.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self._memory = mmap.mmap(descriptor, _NUM_VALUES * 8)
        finally:
            os.close(descriptor)
        self._values = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, run_dir: Path) -> Self:
        """Create the page, in place of the page of a previous engine."""
        path = run_dir / _NAME
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, _NUM_VALUES * 8)
        return cls(descriptor)

    @classmethod
    def open(cls, run_dir: Path) -> Self:
        """Open the page of the engine in ``run_dir``."""
        return cls(os.open(run_dir / _NAME, os.O_RDWR))

    @property
    def beat(self) -> int:
        """A number that grows with each turn of the engine's loop; 0 until the first turn."""
        return self._values[_BEAT]

    @property
    def retry_after_s(self) -> int:
        """Estimated seconds until the requests that wait now have finished."""
        return self._values[_RETRY_AFTER_S]

    @property
    def queue(self) -> QueueState:
        """The occupancy of the queue."""
        return QueueState(*self._values[_QUEUE:])

    def write(self, queue: QueueState, retry_after_s: int) -> None:
        """Write the present state, and advance the heartbeat."""
        self._values[_BEAT] += 1
        self._values[_RETRY_AFTER_S] = retry_after_s
        for place, value in enumerate(queue, _QUEUE):
            self._values[place] = value

    def close(self) -> None:
        """Unmap the page."""
        self._values.release()
        self._memory.close()
