"""``paged-backend bench adapters``: requests with LoRA adapters and without them."""

from __future__ import annotations

import argparse

from paged_backend.cli.bench.options import add_counts, add_turns, print_turns, use_threads
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.values import engine_args

RANKS = (4, 8, 8, 8, 16, 16, 16, 16)
DTYPES = ("float32", "bfloat16", "float16")


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "adapters",
        help="what LoRA adapters cost on a CPU",
        description="Generate 128 tokens of random prompts, in turn without LoRA, with LoRA "
        "enabled for requests without adapters, and for requests that name adapters with random "
        "weights in turns. Two engines are in memory at once. On a CPU only.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("workload")
    add_counts(group, "--ranks", RANKS, "the rank of each adapter")
    group.add_argument(
        "--adapter-dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="data type of the adapters' files (default: %(default)s)",
    )
    add_turns(group)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.adapters import HEADER, AdaptersBench

    use_threads(args)
    config = engine_args.from_mapping(engine_options(args)).config
    bench = AdaptersBench(config, args.ranks, args.adapter_dtype)
    return print_turns(args, HEADER, bench.measure(args.concurrency, args.rounds))
