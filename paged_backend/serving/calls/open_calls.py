"""Calls without a final response, their deadlines, and checks for their cancellation."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paged_backend.serving.calls.answer import Answer
from paged_backend.serving.calls.preparation import Load
from paged_backend.serving.calls.token_bucket import TokenBucket
from paged_backend.serving.contract import Array
from paged_backend.serving.fields import Tensors
from paged_backend.serving.metrics.observer import CallClock

# A check takes 76 microseconds of the sending thread, too long for each response.
CANCEL_CHECKS_PER_S = 2000
MAX_ENDED = 256  # deadlines of ended calls that are kept until they pass


class Sender(Protocol):
    """Sends responses to one client, from one thread at a time.

    The thread that accepts or prepares the call uses it first, and the sending thread after that.
    """

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """Send one response."""

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""

    def is_cancelled(self) -> bool:
        """Whether the client has disconnected or canceled the call."""


@dataclass(eq=False, slots=True)
class Arrival:
    """A call as it arrived, before any check.

    ``timeout_s`` is the server's timeout for the call; the call may have its own as well.
    """

    tensors: Tensors
    parameters_json: str
    timeout_s: float | None
    sender: Sender
    clock: CallClock = field(default_factory=CallClock)
    call_id: str | None = None
    is_request: bool = False  # it goes to the engine; other calls need the tokenizer only
    is_cancelled: bool = False  # canceled by its name, before the engine knew it
    load: Load = field(init=False)

    def __post_init__(self) -> None:
        self.load = Load.of(self.tensors, self.parameters_json)


@dataclass(slots=True)
class OpenCall:
    """A call that has had no final response yet."""

    answer: Answer
    sender: Sender
    clock: CallClock
    timeout_s: float | None
    is_in_flight: bool = False  # an engine knows it
    num_crashes: int = 0  # number of engines that died while it was in flight

    @property
    def deadline_s(self) -> float:
        """The call's deadline, in seconds of the monotonic clock."""
        return math.inf if self.timeout_s is None else self.clock.started + self.timeout_s


class CancelSweep:
    """Chooses calls to check for cancellation: all in turn, at a limited rate."""

    def __init__(self) -> None:
        self._queue: deque[str] = deque()
        self._allowance = TokenBucket(CANCEL_CHECKS_PER_S)

    def due(self, open_calls: Collection[str]) -> list[str]:
        """Return the ids of calls to check now.

        Some of the calls may have ended. An id may occur twice if calls have started since the
        last check.
        """
        due: list[str] = []
        for _ in range(self._allowance.take(len(open_calls))):
            if not self._queue:
                self._queue.extend(open_calls)
            due.append(self._queue.popleft())
        return due


class Deadlines:
    """Finds open calls that are past their deadline, without looking at all of them."""

    def __init__(self, calls: Mapping[str, OpenCall]) -> None:
        self._calls = calls
        self._heap: list[tuple[float, str]] = []  # of deadlines; calls may have ended since

    def add(self, request_id: str) -> None:
        """Watch the deadline of an open call."""
        deadline_s = self._calls[request_id].deadline_s
        if deadline_s == math.inf:
            return
        heapq.heappush(self._heap, (deadline_s, request_id))
        if len(self._heap) > 2 * len(self._calls) + MAX_ENDED:
            self._heap = [(at_s, id_) for at_s, id_ in self._heap if id_ in self._calls]
            heapq.heapify(self._heap)

    def due(self) -> list[str]:
        """Return the ids of open calls that are past their deadline.

        An id that was returned is not returned again.
        """
        now = time.monotonic()
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            if request_id in self._calls:
                due.append(request_id)
        return due
