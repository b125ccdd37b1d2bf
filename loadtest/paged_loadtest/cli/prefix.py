"""``paged-backend bench prefix``: the gain of prefix-cache hits on a running server."""

from __future__ import annotations

import argparse
from dataclasses import fields

from paged_backend.tools.workloads.options import WorkloadOptions
from paged_backend.values.flags import add_flags, flag_values
from paged_loadtest.cli.options import (
    Subparsers,
    add_server_options,
    add_workload_options,
    session,
    workload,
)
from paged_loadtest.options import PrefixOptions

_FREE = ("num_prompts", "seed", "prompt_format", "output_len", "ignore_eos")


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "prefix",
        help="a running server at prefix-cache hit rates from 0 to 100%",
        description="Send prompts of one length that share more and more of their beginning, and "
        "print the measured part that came from the cache beside the one asked for. The default is "
        "32 prompts for each hit rate.",
    )
    add_server_options(parser)
    add_flags(parser.add_argument_group("prefix"), PrefixOptions)
    fixed = {spec.name: spec.default for spec in fields(WorkloadOptions) if spec.name not in _FREE}
    add_workload_options(parser, leave_out=fixed)
    parser.set_defaults(run=run, **fixed)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    options = PrefixOptions(**flag_values(args, PrefixOptions))
    wanted, described = session(args), workload(args)
    from paged_loadtest.benches import sweep_prefixes

    return sweep_prefixes(wanted, described, options)
