"""``paged-backend bench serve``: what the clients of a running server see."""

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
from paged_loadtest.options import LoadOptions


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "serve",
        help="a running server, ours or a peer's, at a rate or a concurrency",
        description="Send a workload to a running server and measure throughput, TTFT, TPOT, ITL, "
        "end-to-end latency and goodput, with the definitions of vLLM's bench serve.",
    )
    add_server_options(parser)
    add_flags(parser.add_argument_group("load"), LoadOptions)
    add_workload_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    load = LoadOptions(**flag_values(args, LoadOptions))
    wanted, described = session(args), workload(args)
    from paged_loadtest.benches import serve

    return serve(wanted, described, load)
