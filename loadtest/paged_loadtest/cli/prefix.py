"""``paged-backend bench prefix``: the gain of prefix-cache hits on a running server."""

from __future__ import annotations

import argparse
from dataclasses import fields

from paged_backend.tools.workloads.options import WorkloadOptions
from paged_loadtest.cli.options import Subparsers, add_bench, installed_extra, measured
from paged_loadtest.options import PrefixOptions

_FREE = ("num_prompts", "seed", "prompt_format", "output_len", "ignore_eos")
_FIXED = {spec.name: spec.default for spec in fields(WorkloadOptions) if spec.name not in _FREE}


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    add_bench(
        kinds,
        "prefix",
        run,
        "prefix",
        PrefixOptions,
        _FIXED,
        help="a running server at prefix-cache hit rates from 0 to 100%%",
        description="Send prompts of one length that share more and more of their beginning, and "
        "print the measured part that came from the cache beside the one asked for. The default is "
        "32 prompts for each hit rate.",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    with installed_extra():
        from paged_loadtest.benches import sweep_prefixes
    return measured(args, PrefixOptions, sweep_prefixes)
