"""``paged-backend bench host``: the host's part of a decode step."""

from __future__ import annotations

import argparse
import itertools

from paged_backend.cli.bench.options import add_count, add_counts, print_rows
from paged_backend.cli.options import Subparsers


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "host",
        help="the host's time for a decode step, without a model",
        description="Time scheduling, messages and input arrays of decode steps, in processor "
        "time. The sequences exist, and no model runs.",
    )
    add_counts(parser, "--batch-sizes", (64, 256), "sequences that decode at once")
    add_counts(parser, "--context", (128, 8000), "tokens of each prompt")
    add_count(parser, "--steps", 75, "timed steps")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.host import HEADER, measure_host

    batches = itertools.product(args.context, args.batch_sizes)
    print_rows(HEADER, (measure_host(size, context, args.steps) for context, size in batches))
    return 0
