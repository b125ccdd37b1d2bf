"""Runs the work before a request reaches the engine, and limits how much of it may wait.

Triton's thread admits every request of an instance, so only small requests are prepared on it.
There are three other threads. One prepares the requests with a constraint on their output, one the
other requests with chat messages, which need the chat template, and one the other large requests.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from paged_backend.errors import RequestRefused
from paged_backend.log import write_internal_error
from paged_backend.serving.contract import Array
from paged_backend.serving.fields import Tensors

# Maximum characters of a request that is prepared at once, which takes about a millisecond.
SMALL = 4096
# Estimated characters per token, before the text is tokenized.
CHARACTERS_PER_TOKEN = 4
_MAX_COUNTED = 256  # strings of a tensor that are measured; a request with more is not small
# Requests that are smaller by this and arrive within a second after a large one overtake it.
_CHARACTERS_PER_S = 100_000
_MAX_PASSED_S = 1.0
_RETRY_AFTER_S = 1

Work = Callable[[], None]
"""The preparation of one request. It must not raise."""


# Names in the parameters, or beginnings of names.
_CONSTRAINTS = ("structured_outputs", "response_format", "guided_", "thinking_token_budget")
_CONSTRAINING = ("guided_decoding_guide_type", "tools")  # tensors


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a request, and the helper processes that its preparation may need."""

    size: int  # characters and numbers
    needs_template: bool
    needs_grammar: bool = False

    @classmethod
    def of(cls, tensors: Tensors, parameters_json: str) -> Load:
        """Measure a request without looking at all of it."""
        size = len(parameters_json) + sum(map(_size, tensors.values()))
        return cls(size, "messages" in tensors, _may_need_grammar(tensors, parameters_json))

    @property
    def is_small(self) -> bool:
        """True if the request may be prepared on the thread that admits all requests."""
        return self.size <= SMALL and not self.needs_template and not self.needs_grammar


def _may_need_grammar(tensors: Tensors, parameters_json: str) -> bool:
    """Return True if the request may have a constraint, without parsing its parameters."""
    if not tensors.keys().isdisjoint(_CONSTRAINING):
        return True
    sources = [parameters_json]
    if "sampling_parameters" in tensors:
        sources.append(str(tensors["sampling_parameters"].reshape(-1)[:1].tolist()))
    return any(name in source for source in sources for name in _CONSTRAINTS)


def _size(tensor: Array) -> int:
    if tensor.dtype != object:
        return tensor.size
    if tensor.size > _MAX_COUNTED:
        return SMALL + tensor.size
    return sum(map(len, tensor.reshape(-1).tolist()))


class Preparation:
    """Prepares requests: small requests at once, and the others on threads.

    Args:
        max_waiting_tokens: limit of the text that waits. Callers limit the number of requests.
    """

    def __init__(self, max_waiting_tokens: int) -> None:
        self._max_size = CHARACTERS_PER_TOKEN * max_waiting_tokens
        # A template or grammar that hangs must not delay requests that need none.
        self._templates = Lane("paged-templates")
        self._grammars = Lane("paged-grammars")
        self._texts = Lane("paged-texts")
        self._lanes = (self._templates, self._grammars, self._texts)

    @property
    def num_waiting(self) -> int:
        """The number of requests that have not been prepared yet."""
        return sum(lane.num_jobs for lane in self._lanes)

    def run(self, load: Load, work: Work) -> None:
        """Prepare a request now if it is small, and otherwise in its turn.

        Raises:
            RequestRefused: too much waits already; nothing was started.
        """
        if load.is_small:
            work()
            return
        waiting = sum(lane.size for lane in self._lanes)
        if load.size > SMALL and waiting and waiting + load.size > self._max_size:
            raise RequestRefused(
                "queue_full",
                f"{waiting} characters wait to be tokenized already (max_waiting_tokens); "
                f"retry after {_RETRY_AFTER_S} s",
            )
        self._lane(load).put(work, load.size)

    def _lane(self, load: Load) -> Lane:
        if load.needs_grammar:
            return self._grammars
        return self._templates if load.needs_template else self._texts

    def close(self) -> None:
        """Prepare the waiting requests, and end the threads."""
        for lane in self._lanes:
            lane.close()


@dataclass(order=True, slots=True)
class _Job:
    due_s: float
    number: int
    work: Work = field(compare=False)
    size: int = field(compare=False)


class Lane:
    """A thread that runs one job after the other.

    A job is due after a delay that grows with its size, up to ``_MAX_PASSED_S`` seconds. The job
    that is due first runs first. So small jobs overtake large ones, but only for a limited time.
    """

    def __init__(self, name: str) -> None:
        self._jobs: list[_Job] = []  # a heap
        self._changed = threading.Condition()
        self._numbers = count()
        self._closed = False
        self.size = 0  # of all jobs that wait or run
        self.num_jobs = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Work, size: int) -> None:
        """Add a job."""
        due_s = time.monotonic() + min(size / _CHARACTERS_PER_S, _MAX_PASSED_S)
        with self._changed:
            self.size += size
            self.num_jobs += 1
            heapq.heappush(self._jobs, _Job(due_s, next(self._numbers), work, size))
            self._changed.notify()

    def close(self) -> None:
        """Run the remaining jobs, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.work()
            except BaseException as error:  # an internal error of one request
                write_internal_error(error)
            with self._changed:
                self.size -= job.size
                self.num_jobs -= 1

    def _next(self) -> _Job | None:
        """Wait for the next job; None once the lane is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            return heapq.heappop(self._jobs) if self._jobs else None
