"""Calls run out of time once, and what has ended is forgotten."""

from __future__ import annotations

from paged_backend.serving.calls.open_calls import MAX_ENDED, Deadlines, OpenCall
from paged_backend.serving.metrics.observer import CallClock


def call(timeout_s, started=None):
    clock = CallClock() if started is None else CallClock(started)
    return OpenCall(answer=None, sender=None, clock=clock, timeout_s=timeout_s)


def test_only_what_is_open_and_over_is_due_and_only_once():
    calls = {"a": call(0.0), "b": call(60.0), "c": call(None), "d": call(0.0)}
    deadlines = Deadlines(calls)
    for name in calls:
        deadlines.add(name)
    del calls["d"]
    assert deadlines.due() == ["a"]
    assert deadlines.due() == []


def test_ended_calls_do_not_pile_up():
    calls = {}
    deadlines = Deadlines(calls)
    for number in range(10 * MAX_ENDED):
        calls[str(number)] = call(86400.0)
        deadlines.add(str(number))
        del calls[str(number)]
    assert len(deadlines._heap) <= MAX_ENDED + 1
