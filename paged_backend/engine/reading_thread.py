"""A thread that reads files for an engine, and that the end of the process does not wait for."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")


class _Job(NamedTuple):
    future: Future[object]
    work: Callable[[], object]


class ReadingThread:
    """Runs one job after the other; it ends with this object, or with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._jobs,), name="adapters", daemon=True)
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Add a job; the future has its result."""
        future: Future[Result] = Future()
        self._jobs.put(_Job(future, work))  # type: ignore[arg-type]
        return future


def _run(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        if job.future.set_running_or_notify_cancel():
            try:
                job.future.set_result(job.work())
            except BaseException as error:
                job.future.set_exception(error)
        del job  # it keeps what was read
