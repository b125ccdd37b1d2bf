"""``paged-backend bench``: measure the engine against a peer on the same work."""

from __future__ import annotations

import argparse
from pathlib import Path

from paged_backend.cli.options import Subparsers, add_engine_options, engine_options


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser("bench", help="measure", description=__doc__)
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    offline = kinds.add_parser(
        "offline",
        help="the engine in this process, beside static-batch transformers.generate",
        description="Run a trace through the engine in this process and through static-batch "
        "transformers.generate, with the end-of-sequence token ignored.",
    )
    add_engine_options(offline)
    group = offline.add_argument_group("workload")
    group.add_argument(
        "--trace",
        type=Path,
        help="JSON lines with prompt_token_ids and max_tokens; default: a seeded log-normal mix",
    )
    group.add_argument(
        "--num-prompts", type=int, default=64, help="requests of the seeded mix (default: 64)"
    )
    group.add_argument("--concurrency", type=int, default=16, help="requests at once (default: 16)")
    group.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    group.add_argument("--json", type=Path, help="write the figures there, too")
    group.add_argument("--no-peer", action="store_true", help="leave transformers out")
    offline.set_defaults(run=run_offline)


def run_offline(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.bench.offline import OfflineBench

    bench = OfflineBench(engine_options(args), threads=args.threads)
    report = bench.run(
        trace=args.trace,
        num_prompts=args.num_prompts,
        concurrency=args.concurrency,
        peer=not args.no_peer,
    )
    report.print()
    if args.json is not None:
        report.save(args.json)
    return 0
