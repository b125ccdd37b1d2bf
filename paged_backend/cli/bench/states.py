"""``paged-backend bench states``: a CPU's functions on states of sequences."""

from __future__ import annotations

import argparse

from paged_backend.cli.bench.options import (
    add_count,
    add_counts,
    add_threads,
    print_rows,
    use_threads,
)
from paged_backend.cli.options import Subparsers


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "states",
        help="a CPU's functions on states of sequences, compared with scaling the states in place",
        description="Time the functions of layers that keep a state per sequence in processor "
        "time, for decodes and one prompt, in turn with multiplying as many numbers in place on "
        "one thread. The convolution and the gated delta rule have the sizes of a layer of "
        "Qwen3-Next-80B-A3B, and the selective scan those of NVIDIA-Nemotron-Nano-9B-v2.",
    )
    add_counts(parser, "--batch-sizes", (1, 16), "sequences that decode at once")
    add_count(parser, "--prompt", 256, "rows of the prompt")
    add_count(parser, "--rounds", 15, "timed rounds")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.states import HEADER, measure_states

    use_threads(args)
    print_rows(HEADER, measure_states(args.batch_sizes, args.prompt, args.rounds))
    return 0
