"""Requests run out of time once, and what has ended is forgotten."""

from __future__ import annotations

import time

from paged_backend.serving.metrics.stat_logger import RequestClock
from paged_backend.serving.requests.open_requests import (
    CANCEL_CHECKS_PER_S,
    CANCEL_INTERVAL_S,
    CANCEL_SETTLE_S,
    MAX_ENDED,
    CancelledSenders,
    CancelSweep,
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


def test_each_request_is_checked_for_cancellation_once_in_an_interval():
    sweep = CancelSweep()
    names = [str(number) for number in range(10)]
    checked = []
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < 4.5 * CANCEL_INTERVAL_S:
        checked += sweep.due(names)
        time.sleep(0.001)
    rounds = len(checked) / len(names)
    assert checked == (names * 10)[: len(checked)]
    assert 2 <= rounds <= elapsed / CANCEL_INTERVAL_S + 1


def test_many_requests_are_checked_at_a_limited_rate():
    names = [str(number) for number in range(10 * CANCEL_CHECKS_PER_S)]
    checked = []
    started = time.monotonic()
    sweep = CancelSweep()
    while time.monotonic() - started < 0.1:
        checked += sweep.due(names)
        time.sleep(0.001)
    elapsed = time.monotonic() - started
    assert checked == names[: len(checked)]
    assert CANCEL_CHECKS_PER_S * 0.05 < len(checked) <= CANCEL_CHECKS_PER_S * elapsed + 1


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
