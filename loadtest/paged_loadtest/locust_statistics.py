"""Records requests in Locust's own statistics, which Locust sums over machines.

Each protocol has these rows. Only ``E2E`` counts in the aggregated row, so a request there is one
inference request. Locust stores whole numbers only, so the other latencies are in microseconds.
Each "request" of ``output tokens`` is one token, so its requests per second are tokens per second.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from locust import stats
from locust.env import Environment
from locust.stats import RequestStats

from paged_loadtest.timeline import Timeline

E2E = "E2E (ms)"
TTFT = "TTFT (us)"
TPOT = "TPOT (us)"
ITL = "ITL (us)"
TOKENS = "output tokens"
CUT_OFF = "cut off at the end of the run; give a longer --stop-timeout"

_LOG = logging.getLogger(__name__)


class RequestFailed(Exception):
    """The reason for a failed request, as Locust's failure table shows it."""

    def __repr__(self) -> str:
        return str(self)


def round_to_three_digits(response_time: float) -> int:
    """The histogram key of a time; Locust's default keeps two digits and is up to 5% off."""
    unit = int(10 ** max(0, math.floor(math.log10(max(response_time, 1))) - 2))
    return round(response_time / unit) * unit


# Locust documents this override; every process that imports this module rounds the same way.
stats.bucket_response_time = round_to_three_digits


def record(environment: Environment, protocol: str, timeline: Timeline) -> None:
    """Record a finished request: its tokens always, its latencies only if it succeeded."""
    for _ in range(timeline.num_output_tokens):
        _log(environment, protocol, TOKENS, None)
    if timeline.is_success:
        _log(environment, protocol, TTFT, timeline.ttft_s)
        for gap_s in timeline.itl_s:
            _log(environment, protocol, ITL, gap_s)
        if timeline.tpot_s is not None:
            _log(environment, protocol, TPOT, timeline.tpot_s)
    environment.events.request.fire(
        request_type=protocol,
        name=E2E,
        response_time=timeline.e2e_s * 1e3 if timeline.is_success else None,
        response_length=timeline.num_output_tokens,
        exception=None if timeline.is_success else RequestFailed(timeline.error or "no token came"),
        context={},
    )


def _log(environment: Environment, protocol: str, name: str, seconds: float | None) -> None:
    entry: Any = environment.stats.get(name, protocol)  # its type stubs do not allow None
    entry.log(None if seconds is None else round(seconds * 1e6), 0)


def num_output_tokens(request_stats: RequestStats) -> int:
    """Total output tokens of all requests so far."""
    rows = request_stats.entries.items()
    return sum(entry.num_requests for (name, _), entry in rows if name == TOKENS)


def summary(request_stats: RequestStats) -> str:
    """Summarize the run in one line."""
    total = request_stats.total
    tokens = num_output_tokens(request_stats)
    last_s = total.last_request_timestamp or time.time()
    duration_s = max(last_s - total.start_time, 1e-3)
    line = (
        f"{tokens} output tokens in {duration_s:.1f} s: {tokens / duration_s:.1f} a second; "
        f"{total.num_requests} calls, {total.num_failures} failed"
    )
    cut_off = sum(e.occurrences for e in request_stats.errors.values() if CUT_OFF in str(e.error))
    if cut_off:
        line += f"; {cut_off} of them were cut off, the server may have made more tokens for these"
    return line
