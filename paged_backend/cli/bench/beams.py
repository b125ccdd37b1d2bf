"""``paged-backend bench beams``: a beam search and as many samples."""

from __future__ import annotations

import argparse

from paged_backend.cli.bench.options import add_counts, add_turns, print_turns, use_threads
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.values import engine_args


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "beams",
        help="what a beam search costs on a CPU",
        description="Generate 128 tokens of random prompts with a beam search, and as many samples "
        "of the same length with the same engine, in turn. On a CPU only.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("workload")
    add_counts(group, "--beam-widths", (4,), "beams of a request, each at most max_beam_width")
    add_turns(group)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.beams import HEADER, BeamsBench

    use_threads(args)
    bench = BeamsBench(engine_args.from_mapping(engine_options(args)).config)
    figures = bench.measure(args.beam_widths, args.concurrency, args.rounds)
    return print_turns(args, HEADER, figures)
