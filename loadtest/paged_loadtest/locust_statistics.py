"""Puts calls into Locust's own statistics, which add themselves up over machines.

Each protocol has these rows. Only ``E2E`` counts for the aggregated row, so that its requests are
calls. Locust keeps whole numbers alone: the other latencies are in microseconds. The requests of
``output tokens`` are tokens, so that its requests a second are tokens a second.
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


class CallFailed(Exception):
    """Why a call failed, as Locust's table of failures shows it."""

    def __repr__(self) -> str:
        return str(self)


def round_to_three_digits(response_time: float) -> int:
    """The key under which Locust counts a time; its own has two digits, up to 5% off."""
    unit = int(10 ** max(0, math.floor(math.log10(max(response_time, 1))) - 2))
    return round(response_time / unit) * unit


# As Locust's documentation has it; each process that loads this module rounds alike.
stats.bucket_response_time = round_to_three_digits


def record(environment: Environment, protocol: str, timeline: Timeline) -> None:
    """Count a call that has ended: its latencies if it succeeded, and the tokens in any case."""
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
        exception=None if timeline.is_success else CallFailed(timeline.error or "no token came"),
        context={},
    )


def _log(environment: Environment, protocol: str, name: str, seconds: float | None) -> None:
    entry: Any = environment.stats.get(name, protocol)  # whose types leave None out
    entry.log(None if seconds is None else round(seconds * 1e6), 0)


def num_output_tokens(request_stats: RequestStats) -> int:
    """Tokens of all calls so far."""
    rows = request_stats.entries.items()
    return sum(entry.num_requests for (name, _), entry in rows if name == TOKENS)


def summary(request_stats: RequestStats) -> str:
    """The run in one line."""
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
