"""Processor time of two calls, all threads together, which other processes hardly change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def times_in_turn(
    compute: Callable[[], object], read: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Return the median milliseconds of both calls, and the median of their ratios.

    A round calls both; the first round does not count.
    """
    pairs = [(_milliseconds(compute), _milliseconds(read)) for _ in range(rounds + 1)][1:]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return first, second, statistics.median(a / b for a, b in pairs)


def _milliseconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3
