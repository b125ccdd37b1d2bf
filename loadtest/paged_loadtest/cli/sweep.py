"""``paged-backend bench sweep``: the latency-throughput curve of a running server."""

from __future__ import annotations

import argparse

from paged_loadtest.cli.options import Subparsers, add_bench, installed_extra, measured
from paged_loadtest.options import SweepOptions

_FIXED = {"trace_speedup": 1.0}  # arrival times do not count


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    add_bench(
        kinds,
        "sweep",
        run,
        "sweep",
        SweepOptions,
        _FIXED,
        help="a running server at concurrency 1, 2, 4 ... until throughput stops rising",
        description="Send a workload with ever more requests at once, at least eight requests for "
        "each that is open, until that brings no more tokens a second.",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    with installed_extra():
        from paged_loadtest.benches import sweep
    return measured(args, SweepOptions, sweep)
