"""``paged-backend bench sweep``: the latency-throughput curve of a running server."""

from __future__ import annotations

import argparse

from paged_backend.values.flags import add_flags, flag_values
from paged_loadtest.cli.options import (
    Subparsers,
    add_server_options,
    add_workload_options,
    session,
    workload,
)
from paged_loadtest.options import SweepOptions

_FIXED = {"trace_speedup": 1.0}  # arrival times do not count


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "sweep",
        help="a running server at concurrency 1, 2, 4 ... until throughput stops rising",
        description="Send a workload with ever more requests at once, at least eight requests for "
        "each that is open, until that brings no more tokens a second.",
    )
    add_server_options(parser)
    add_flags(parser.add_argument_group("sweep"), SweepOptions)
    add_workload_options(parser, leave_out=_FIXED)
    parser.set_defaults(run=run, **_FIXED)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    options = SweepOptions(**flag_values(args, SweepOptions))
    wanted, described = session(args), workload(args)
    from paged_loadtest.benches import sweep

    return sweep(wanted, described, options)
