"""Counting in buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged_backend.values.histogram import RunningHistogram

BOUNDS = (0.5, 1.0, 4.0)


@given(st.lists(st.tuples(st.sampled_from([0, 0.5, 0.75, 1, 2, 4, 5, 1e9]), st.integers(1, 5))))
def test_each_bound_counts_what_does_not_exceed_it(observed):
    histogram = RunningHistogram(BOUNDS)
    values = [value for value, times in observed for _ in range(times)]
    for value, times in observed:
        histogram.observe(value, times)
    counts = histogram.counts()
    expected = [sum(value <= bound for value in values) for bound in (*BOUNDS, float("inf"))]
    assert list(counts.cumulative) == expected
    assert counts.total == sum(values)
