"""Requests run out of time once, and what has ended is forgotten."""

from __future__ import annotations

import pytest

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


TICK_S = 1 / 1024  # a number without rounding errors


def test_each_request_is_checked_for_cancellation_once_in_an_interval(clock):
    sweep = CancelSweep()
    names = [str(number) for number in range(10)]
    checked, rounds = [], []
    for tick in range(int(4.5 * CANCEL_INTERVAL_S / TICK_S)):
        checked += sweep.due(names)
        if len(checked) == len(names):
            rounds.append(tick * TICK_S)
            assert checked == names
            checked = []
        clock.advance(TICK_S)
    assert len(rounds) == 5 and checked == []
    # The checks of a round take their time, too.
    assert rounds == pytest.approx([CANCEL_INTERVAL_S * n for n in range(5)], abs=0.02)


def test_many_requests_are_checked_at_a_limited_rate(clock):
    names = [str(number) for number in range(10 * CANCEL_CHECKS_PER_S)]
    sweep = CancelSweep()
    checked = sweep.due(names)
    for _ in range(512):
        clock.advance(TICK_S)
        checked += sweep.due(names)
    assert checked == names[: CANCEL_CHECKS_PER_S // 2]
    assert len(sweep._queue) + len(checked) == len(names)  # no other round has begun


def test_a_canceled_request_ends_later_and_once(clock):
    cancelled = CancelledSenders()
    cancelled.add("a")
    cancelled.add("b")
    clock.advance(0.9 * CANCEL_SETTLE_S)
    assert list(cancelled.take_due()) == []
    assert len(cancelled) == 2
    cancelled.add("c")
    clock.advance(0.11 * CANCEL_SETTLE_S)
    assert list(cancelled.take_due()) == ["a", "b"]
    assert list(cancelled.take_all()) == ["c"]
    assert len(cancelled) == 0
