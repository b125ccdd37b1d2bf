"""A thread that reads files for an engine, and that the end of the process does not wait for."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


class ReadingThread:
    """Runs one job after the other; it ends with this object, or with the process."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._jobs,), name="adapters", daemon=True)
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Add a job; the future has its result."""
        future: Future[Result] = Future()
        self._jobs.put(partial(_finish, future, work))
        return future


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it keeps what was read


def _finish(future: Future[Result], work: Callable[[], Result]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
