"""Histograms that are updated value by value, with the buckets of Prometheus.

The library `prometheus_client` has no counts that one process can send to another and add up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class HistogramCounts(NamedTuple):
    """The counts of a histogram at one moment."""

    cumulative: tuple[int, ...]  # values up to each bound; the last one: all values
    total: float  # their sum

    def plus(self, other: HistogramCounts) -> HistogramCounts:
        """Add the counts of a histogram with the same bounds."""
        pairs = zip(self.cumulative, other.cumulative, strict=True)
        return HistogramCounts(tuple(a + b for a, b in pairs), self.total + other.total)


class RunningHistogram:
    """Counts values by ascending upper bounds; a last bucket takes larger values."""

    __slots__ = ("_buckets", "_total", "bounds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._buckets = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones."""
        self._buckets[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def counts(self) -> HistogramCounts:
        """The counts now."""
        return HistogramCounts(tuple(accumulate(self._buckets)), self._total)
