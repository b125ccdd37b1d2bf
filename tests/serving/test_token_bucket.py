"""Rates are kept to, over any number of looks."""

from __future__ import annotations

import time

from paged_backend.serving.requests.token_bucket import TokenBucket


def test_no_more_than_the_rate_however_often_it_is_asked():
    token_bucket = TokenBucket(1000)
    started = time.monotonic()
    granted, least, last = 0, 0.0, started
    while time.monotonic() - started < 0.1:
        time.sleep(0.001)
        # 50 at most are saved, so what a long pause of this process would bring besides is lost.
        least += min(49.0, (time.monotonic() - last) * 1000)
        granted += token_bucket.take(50)
        last = time.monotonic()
    assert least > 10
    assert least - 1 <= granted <= (time.monotonic() - started) * 1000 + 1


def test_what_was_not_wanted_is_saved_for_a_burst_only():
    steady, bursty = TokenBucket(1000), TokenBucket(1000, burst=30)
    time.sleep(0.1)
    asked = time.monotonic()
    assert steady.take(0) == bursty.take(0) == 0
    granted = steady.take(100), bursty.take(100)
    since = (time.monotonic() - asked) * 1000 + 1
    assert granted[0] <= since
    assert 30 <= granted[1] <= 30 + since
