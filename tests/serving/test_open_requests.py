"""Requests run out of time once, and what has ended is forgotten."""

from __future__ import annotations

import time

from paged_backend.serving.metrics.stat_logger import RequestClock
from paged_backend.serving.requests.open_requests import (
    CANCEL_SETTLE_S,
    MAX_ENDED,
    CancelledSenders,
    Deadlines,
    OpenRequest,
)


def open_request(timeout_s, started=None):
    clock = RequestClock() if started is None else RequestClock(started)
    return OpenRequest(answer=None, sender=None, clock=clock, timeout_s=timeout_s)


def test_only_what_is_open_and_over_is_due_and_only_once():
    timeouts = {"a": 0.0, "b": 60.0, "c": None, "d": 0.0}
    requests = {name: open_request(timeout_s) for name, timeout_s in timeouts.items()}
    deadlines = Deadlines(requests)
    for name in requests:
        deadlines.add(name)
    del requests["d"]
    assert deadlines.due() == ["a"]
    assert deadlines.due() == []


def test_ended_requests_do_not_pile_up():
    requests = {}
    deadlines = Deadlines(requests)
    for number in range(10 * MAX_ENDED):
        requests[str(number)] = open_request(86400.0)
        deadlines.add(str(number))
        del requests[str(number)]
    assert len(deadlines._heap) <= MAX_ENDED + 1


def test_a_canceled_request_ends_later_and_once():
    cancelled = CancelledSenders()
    cancelled.add("a")
    cancelled.add("b")
    assert list(cancelled.take_due()) == []
    assert len(cancelled) == 2
    time.sleep(CANCEL_SETTLE_S)
    cancelled.add("c")
    assert list(cancelled.take_due()) == ["a", "b"]
    assert list(cancelled.take_all()) == ["c"]
    assert len(cancelled) == 0
