"""Rates are kept to, over any number of looks."""

from __future__ import annotations

from paged_backend.serving.requests.token_bucket import TokenBucket

TICK_S = 1 / 1024  # a number without rounding errors


def test_no_more_than_the_rate_however_often_it_is_asked(clock):
    token_bucket = TokenBucket(1000)
    granted = 0
    for _ in range(512):
        clock.advance(TICK_S)
        granted += token_bucket.take(50)
    assert granted == 500
    clock.advance(60)  # 50 at most are saved
    assert [token_bucket.take(50), token_bucket.take(50)] == [50, 0]


def test_what_was_not_wanted_is_saved_for_a_burst_only(clock):
    steady, bursty = TokenBucket(1000), TokenBucket(1000, burst=30)
    clock.advance(0.125)
    assert steady.take(0) == bursty.take(0) == 0
    assert (steady.take(100), bursty.take(100)) == (0, 30)
    clock.advance(1 / 64)
    assert (steady.take(100), bursty.take(100)) == (15, 15)
