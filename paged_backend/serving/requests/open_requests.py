"""Requests without a final response, their deadlines, and checks for their cancellation."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paged_backend.serving.contract import Array
from paged_backend.serving.fields import Tensors
from paged_backend.serving.metrics.stat_logger import RequestClock
from paged_backend.serving.requests.brought_adapters import BroughtAdapter
from paged_backend.serving.requests.preparation import Load
from paged_backend.serving.requests.tasks import Task
from paged_backend.serving.requests.token_bucket import TokenBucket
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request

# To ask whether a client has canceled takes 76 microseconds of the sending thread and as much of
# the server, too long for each response. A request that is canceled by its name does not wait for
# this.
CANCEL_CHECKS_PER_S = 1000
CANCEL_INTERVAL_S = 0.25  # between two checks of a request, or longer if many are open
MAX_ENDED = 256  # deadlines of ended requests that are kept until they pass
# The gRPC front end of tritonserver 24.10 can crash if the final response to a canceled request
# arrives while an earlier response is still being written (fixed by server pull request 8078).
CANCEL_SETTLE_S = 0.1


class Sender(Protocol):
    """Sends responses to one client, from one thread at a time.

    The thread that accepts or prepares the request uses it first, and the sending thread after
    that.
    """

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """Send one response."""

    def prepare(self, tensors: dict[str, Array], final: bool) -> Callable[[], None]:
        """Make one response; the result sends it."""
        ...

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""

    def is_cancelled(self) -> bool:
        """Whether the client has disconnected or canceled the request."""


class RequestAnswer(Protocol):
    """The answer to one request: outputs of the engine, until they are sent as responses."""

    request: Request

    def append(self, output: SequenceOutput) -> bool:
        """Add the output of a step; returns whether the engine must be told to stop."""
        ...

    @property
    def is_finished(self) -> bool:
        """Return True if the request has ended."""
        ...

    @property
    def is_due(self) -> bool:
        """Return True if a response should be sent now."""
        ...

    @property
    def progress(self) -> list[list[int] | None]:
        """The tokens of each completion so far, to resume it; None for one that has ended."""
        ...

    @property
    def is_large(self) -> bool:
        """Return True if the next response takes long to make or to send."""
        ...

    def take(self) -> dict[str, Array]:
        """Return the output tensors of the next response, and drop what they contain."""
        ...

    def take_later(self) -> Callable[[], dict[str, Array]]:
        """Do the same, but leave the work to the result, which another thread may call."""
        ...


@dataclass(eq=False, slots=True)
class IncomingRequest:
    """A request of the server, until it is open, answered or refused.

    ``timeout_s`` is the server's timeout for the request; the request may have its own as well.
    """

    tensors: Tensors
    parameters_json: str
    timeout_s: float | None
    sender: Sender
    clock: RequestClock = field(default_factory=RequestClock)
    is_cancelled: bool = False  # canceled by its name, before the engine knew it
    tenant: str = ""  # that its preparation is charged to, unless it is small
    is_large: bool = False  # each of its responses is sent as a large one
    adapter: BroughtAdapter | None = None  # that it brings, and names in its parameters
    load: Load = field(init=False)
    task: Task = field(init=False)  # once it has been read

    def __post_init__(self) -> None:
        self.load = Load.of(self.tensors, self.parameters_json)


@dataclass(slots=True)
class OpenRequest:
    """A request that has had no final response yet."""

    answer: RequestAnswer
    sender: Sender
    clock: RequestClock
    timeout_s: float | None
    result_bytes: int = 0  # size of its logits and log-probabilities
    is_large: bool = False  # each of its responses is sent as a large one
    route: Sequence[bytes] = ()  # result of `Engines.route`
    engine: int | None = None  # number of the engine that knows it
    num_crashes: int = 0  # number of engines that died while it was in flight
    is_lent: bool = False  # a large response is being sent; only that thread uses the sender
    end: Exception | None = None  # what ends it once it is not lent anymore
    was_aborted: bool = False  # the engine ended a completion without finishing it

    @property
    def deadline_s(self) -> float:
        """The request's deadline, in seconds of the monotonic clock."""
        return math.inf if self.timeout_s is None else self.clock.started + self.timeout_s


class CancelSweep:
    """Chooses requests to check for cancellation: each in turn, at a limited rate."""

    def __init__(self) -> None:
        self._queue: deque[str] = deque()  # request ids of this round
        self._next_round_s = 0.0  # time of the monotonic clock
        self._allowance = TokenBucket(CANCEL_CHECKS_PER_S)

    def due(self, request_ids: Collection[str]) -> list[str]:
        """Return the ids of requests to check now. Some of these requests may have ended.

        Args:
            request_ids: the ids of all open requests.
        """
        now = time.monotonic()
        if not self._queue and now >= self._next_round_s:
            self._next_round_s = now + CANCEL_INTERVAL_S
            self._queue.extend(request_ids)
        return [self._queue.popleft() for _ in range(self._allowance.take(len(self._queue)))]


class CancelledSenders:
    """Senders of canceled requests, each until its final response may be sent."""

    def __init__(self) -> None:
        self._queue: deque[tuple[float, Sender]] = deque()  # the earliest first

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, sender: Sender) -> None:
        """Keep a sender for ``CANCEL_SETTLE_S`` seconds."""
        self._queue.append((time.monotonic() + CANCEL_SETTLE_S, sender))

    def take_due(self) -> Iterator[Sender]:
        """Remove and yield the senders that were kept for long enough."""
        now = time.monotonic()
        while self._queue and self._queue[0][0] <= now:
            yield self._queue.popleft()[1]

    def take_all(self) -> Iterator[Sender]:
        """Remove and yield all senders."""
        while self._queue:
            yield self._queue.popleft()[1]


class Deadlines:
    """Finds open requests that are past their deadline, without looking at all of them."""

    def __init__(self, requests: Mapping[str, OpenRequest]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, str]] = []  # deadlines; requests may have ended since

    def add(self, request_id: str) -> None:
        """Watch the deadline of an open request."""
        deadline_s = self._requests[request_id].deadline_s
        if deadline_s == math.inf:
            return
        heapq.heappush(self._heap, (deadline_s, request_id))
        if len(self._heap) > 2 * len(self._requests) + MAX_ENDED:
            self._heap = [(at_s, id_) for at_s, id_ in self._heap if id_ in self._requests]
            heapq.heapify(self._heap)

    def due(self) -> list[str]:
        """Return the ids of open requests that are past their deadline.

        An id that was returned is not returned again.
        """
        now = time.monotonic()
        due: list[str] = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            if request_id in self._requests:
                due.append(request_id)
        return due
