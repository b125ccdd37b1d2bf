"""``paged-backend bench speculation``: requests with speculation and without it."""

from __future__ import annotations

import argparse

from paged_backend.cli.bench.options import add_turns, print_turns, use_threads
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.tools.bench.speculation_traces import KINDS
from paged_backend.values import engine_args


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "speculation",
        help="what speculation gains on a CPU",
        description="Generate answers that repeat themselves as real ones do (an edited document, "
        "JSON, code), and random ones, in turn with speculation and without it. The model "
        "is computed, and the tokens of these answers replace what it samples. On a CPU only.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--traces",
        type=_traces,
        default=list(KINDS),
        help=f"kinds of answers (default: {','.join(KINDS)})",
    )
    add_turns(group)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.speculation import HEADER, SpeculationBench

    use_threads(args)
    bench = SpeculationBench(engine_args.from_mapping(engine_options(args)).config)
    return print_turns(args, HEADER, bench.measure(args.traces, args.concurrency, args.rounds))


def _traces(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(KINDS)}, got {name!r}")
    return names
