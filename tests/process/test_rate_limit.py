"""The buckets of requests, one for each tenant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.process.rate_limit import MAX_TENANTS, TenantRateLimit


def test_a_burst_of_two_seconds_worth_is_taken_then_one_at_a_time():
    limit = TenantRateLimit(5)
    assert [limit.admit("a", 100.0) for _ in range(10)] == [None] * 10
    assert limit.admit("a", 100.0) == pytest.approx(0.2)
    assert limit.admit("a", 100.1) == pytest.approx(0.1)
    assert limit.admit("b", 100.1) is None
    assert limit.admit("a", 100.201) is None
    assert limit.admit("a", 100.201) == pytest.approx(0.199)


def test_less_than_one_in_two_seconds_still_takes_one():
    limit = TenantRateLimit(0.01)
    assert limit.admit("a", 0.0) is None
    assert limit.admit("a", 40.0) == pytest.approx(60.0)
    assert limit.admit("a", 100.0) is None


def test_full_buckets_are_forgotten():
    limit = TenantRateLimit(10)
    for number in range(1000):
        assert limit.admit(f"t{number}", 0.001 * number) is None
    assert len(limit) <= 101
    limit.admit("later", 10.0)
    assert len(limit) == 1


def test_no_more_tenants_are_remembered_than_so_many():
    limit = TenantRateLimit(0.001)
    for number in range(MAX_TENANTS + 100):
        limit.admit(str(number), 0.0)
    assert len(limit) <= MAX_TENANTS + 1
    assert limit.admit(str(number), 0.0) is not None


@given(
    rate=st.floats(0.1, 100),
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=200),
)
def test_any_span_of_time_holds_no_more_than_the_rate_and_a_burst(rate, gaps):
    """And what is refused is taken after the time that was told."""
    limit, now, taken = TenantRateLimit(rate), 0.0, []
    for gap in gaps:
        now += gap
        wait_s = limit.admit("a", now)
        if wait_s is None:
            taken.append(now)
            continue
        assert 0 < wait_s <= 1 / rate + 1e-6
        now += wait_s + 1e-9
        assert limit.admit("a", now) is None
        taken.append(now)
    burst = max(1.0, 2 * rate)
    for first, since in enumerate(taken):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + (taken[last] - since) * rate + 1e-6
