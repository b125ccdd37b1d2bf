"""``paged-backend bench serve``: what the clients of a running server see."""

from __future__ import annotations

import argparse

from paged_loadtest.cli.options import Subparsers, add_bench, installed_extra, measured
from paged_loadtest.options import ServeOptions


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    add_bench(
        kinds,
        "serve",
        run,
        "load",
        ServeOptions,
        help="a running server, ours or a peer's, at a rate or a concurrency",
        description="Send a workload to a running server and measure throughput, TTFT, TPOT, ITL, "
        "end-to-end latency and goodput, with the definitions of vLLM's bench serve. With "
        "--peer-url, another server is measured in turn.",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    with installed_extra():
        from paged_loadtest.benches import serve
    return measured(args, ServeOptions, serve)
