"""The chances of drafts that the device draws, from the growth of texts."""

from __future__ import annotations

import pytest

from paged_backend.speculation.drawn_drafts import DrawnAcceptance, DrawnDrafts


def test_chances_follow_the_drafts_of_each_step() -> None:
    """Steps return in the order of their plans; one of them is in flight while the next is made."""
    usual = DrawnAcceptance()
    drawn, before = DrawnDrafts(usual), usual.chances(0.9, 4)
    assert before == drawn.chances(0.9, 4)
    start, num_known = 10, 11
    drawn.plan(start, 0.9)
    for _ in range(100):
        drawn.plan(start + 5, 0.1)
        drawn.note_return(start, 4, num_known)
        num_known += 3  # two of the four drafts were right
        drawn.learn(num_known)
        drawn.learn(num_known)  # there is no other step
        drawn.plan(start + 10, 0.9)
        drawn.note_return(start + 5, 4, num_known)
        num_known += 1
        drawn.learn(num_known)
        start += 10
    # Of the drafts that follow a right one, every second one was right.
    assert drawn.chances(0.9, 4) == pytest.approx([1, 0.5, 0.5, 0.5], abs=0.05)
    assert drawn.chances(0.1, 2)[0] < 0.01
    assert drawn.chances(0.5, 2) == usual.chances(0.5, 2)
    assert before[0] < usual.chances(0.9, 1)[0] < drawn.chances(0.9, 1)[0]


def test_what_was_not_planned_or_gave_no_token_does_not_count() -> None:
    usual = DrawnAcceptance()
    drawn, before = DrawnDrafts(usual), usual.chances(0.5, 3)
    drawn.note_return(10, 2, 11)
    drawn.learn(14)
    drawn.plan(10, 0.5)
    drawn.note_return(10, 2, 11)
    drawn.learn(11)  # the sequence was preempted
    assert drawn.chances(0.5, 3) == usual.chances(0.5, 3) == before
