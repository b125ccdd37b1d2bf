"""The requests that the users of one process send, including those in flight."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice
from time import perf_counter

import gevent
from gevent import Greenlet
from gevent.event import Event
from gevent.pool import Group
from locust.env import Environment

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_loadtest.locust_statistics import record
from paged_loadtest.locust_wires import Transport


class Traffic:
    """Hands out requests and sends them independently of the users.

    When Locust stops a user, its request continues, so that every token is counted. This process
    sends every ``count``-th request, starting at ``index``. ``user_rate`` is the requests per
    second of each user; None means one request after another. ``give_up`` is called with the
    reason when a server stops answering.
    """

    def __init__(
        self,
        environment: Environment,
        requests: Sequence[WorkloadRequest],
        wires: Mapping[type[Transport], Transport],
        give_up: Callable[[str], None],
        *,
        user_rate: float | None,
        index: int = 0,
        count: int = 1,
    ) -> None:
        is_replay = bool(requests) and requests[0].arrival_s is not None
        endless: Iterable[WorkloadRequest] = requests if is_replay else cycle(requests)
        self.user_rate = user_rate
        self.is_open_loop = is_replay or user_rate is not None
        self.began_s = perf_counter()
        self.random = random.Random(index)
        self._environment = environment
        self._requests = islice(endless, index, None, count)
        self._wires = wires
        self._give_up = give_up
        self._is_checking = False
        self._in_flight = Group()
        self._is_over = Event()

    def next_request(self) -> WorkloadRequest | None:
        """Return the next request to send; None when there are no more."""
        return None if self._is_over.is_set() else next(self._requests, None)

    def begin(self, wire_type: type[Transport], request: WorkloadRequest) -> Greenlet:
        """Start a request and its follow-up requests without waiting for them."""
        return self._in_flight.spawn(self._converse, self._wires[wire_type], request)

    def finish(self, timeout_s: float) -> None:
        """Start no more requests and wait for those in flight; kill them after the timeout."""
        self._is_over.set()
        self._in_flight.join(timeout_s)
        self._in_flight.kill()

    def _converse(self, wire: Transport, request: WorkloadRequest | None) -> None:
        while request is not None:
            timeline, is_lost = wire.send(request)
            record(self._environment, wire.name, timeline)
            if is_lost:
                self._check(wire)
            goes_on = timeline.is_success and not self._is_over.is_set()
            request = request.follow_up(timeline.text) if goes_on else None

    def _check(self, wire: Transport) -> None:
        """Check that the server still answers, once for all requests that failed together."""
        if self._is_checking or self._is_over.is_set():
            return
        self._is_checking = True
        try:
            wire.check()
        except ConfigError as error:
            # Not in this greenlet: giving up waits for all requests, including this one.
            gevent.spawn(self._give_up, str(error))
        else:
            self._is_checking = False
