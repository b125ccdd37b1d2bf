"""``paged-backend bench experts``: a CPU's products of experts."""

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
from paged_backend.values.errors import ConfigError


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "experts",
        help="a CPU's products of experts, compared with reading their weights",
        description="Time the experts of one mixture-of-experts layer in processor time, in turn "
        "with reading as many bytes as the chosen experts have. Weights, rows and choices are "
        "random. The default sizes are Qwen3-30B-A3B's.",
    )
    add_count(parser, "--num-experts", 128, "experts of the layer")
    add_count(parser, "--num-experts-per-tok", 8, "experts that a row chooses")
    add_count(parser, "--hidden-size", 2048, "numbers of a row")
    add_count(parser, "--intermediate-size", 768, "numbers between the products of an expert")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_counts(parser, "--batch-sizes", (1, 16, 64), "rows at once")
    add_count(parser, "--rounds", 15, "timed rounds")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.experts import HEADER, ExpertsSizes, measure_experts

    if args.num_experts_per_tok > args.num_experts:
        raise ConfigError(
            f"--num-experts-per-tok must be at most {args.num_experts} (--num-experts), got "
            f"{args.num_experts_per_tok}"
        )
    use_threads(args)
    sizes = ExpertsSizes(
        args.num_experts,
        args.num_experts_per_tok,
        args.hidden_size,
        args.intermediate_size,
        args.dtype,
    )
    print_rows(HEADER, measure_experts(sizes, args.batch_sizes, args.rounds))
    return 0
