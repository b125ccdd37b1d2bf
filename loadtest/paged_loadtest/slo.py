"""Latency limits (SLOs): goodput counts the requests that meet all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten
from paged_loadtest.timeline import Timeline

# A request's value in seconds. Its ITL is the mean of its gaps; a request without gaps meets it.
_VALUES: dict[str, Callable[[Timeline], float]] = {
    "ttft": lambda timeline: timeline.ttft_s,
    "tpot": lambda timeline: timeline.tpot_s or 0.0,
    "itl": lambda timeline: statistics.fmean(timeline.itl_s or [0.0]),
    "e2e": lambda timeline: timeline.e2e_s,
}


@dataclass(frozen=True, slots=True)
class Slo:
    """A latency that a request must not exceed."""

    name: str
    limit_ms: float


def parse_slo(text: str) -> Slo:
    """Parse an SLO such as ``ttft:500``; the limit is in milliseconds.

    Raises:
        ConfigError: the text does not have that form.
    """
    name, _, limit = text.partition(":")
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = math.nan
    if name not in _VALUES or not 0 < limit_ms < math.inf:
        raise ConfigError(
            f"slo: must be one of {', '.join(_VALUES)}, a colon and milliseconds above 0, "
            f"such as ttft:500; got {shorten(text)}"
        )
    return Slo(name, limit_ms)


def meets(timeline: Timeline, slo: Slo) -> bool:
    """Return True if a request that succeeded meets the SLO."""
    return _VALUES[slo.name](timeline) * 1e3 <= slo.limit_ms
