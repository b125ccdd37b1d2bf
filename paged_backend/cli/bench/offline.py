"""``paged-backend bench offline``: the engine in this process, compared with another engine."""

from __future__ import annotations

import argparse

from paged_backend.cli.bench.options import (
    ROUNDS,
    add_count,
    add_json,
    add_threads,
    count,
    use_threads,
)
from paged_backend.cli.bench.peers import add_peer, chosen_peer
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.tools.bench.peer_options import DTYPES, PEERS
from paged_backend.tools.workloads.options import WorkloadOptions
from paged_backend.values.flags import add_flags, flag_values

_FIXED = {"prompt_format": "ids", "ignore_eos": True, "trace_speedup": 1.0}
"""Workload options that are fixed because there is no server."""


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "offline",
        help="the engine in this process, compared with another engine",
        description="Measure the engine in this process and another one in a separate process, "
        "in turn: a workload, one request alone, the first token of a long prompt, and requests "
        "with a common prefix. Prompts are token ids, and the end-of-sequence token is ignored. "
        "--seed is the workload's, too; arrival times do not count.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("workload")
    add_flags(group, WorkloadOptions, leave_out=["seed", *_FIXED])
    add_count(group, "--concurrency", 16, "requests at once")
    group.add_argument(
        "--structured-outputs",
        metavar="JSON",
        help="constrain requests, in the form of the request field of that name, and measure such "
        "requests without it in turn; needs --no-peer",
    )
    group.add_argument(
        "--structured-output-ratio",
        type=_share,
        default=1.0,
        help="part of the requests that are constrained (default: 1)",
    )
    add_threads(group)
    add_json(group, "the figures of all rounds")
    group = add_peer(parser, PEERS, "in static batches")
    group.add_argument(
        "--peer-dtype",
        choices=DTYPES,
        help="the peer's number format (default: the engine's); int8 rounds weights only",
    )
    group.add_argument(
        "--rounds",
        type=count,
        help=f"times that everything is measured (default: {ROUNDS} with a peer or with "
        "--structured-outputs, otherwise 1)",
    )
    parser.set_defaults(run=run, **_FIXED)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.constrained import Constraint
    from paged_backend.tools.bench.offline import OfflineBench
    from paged_backend.values.garbage import keep_loaded

    constraint = None
    if args.structured_outputs is not None:
        constraint = Constraint(args.structured_outputs, args.structured_output_ratio)
    workload = WorkloadOptions(**flag_values(args, WorkloadOptions))
    peer = chosen_peer(args, args.peer_dtype)
    use_threads(args)
    bench = OfflineBench(engine_options(args))
    keep_loaded()  # as the process of a served engine does
    report = bench.run(
        workload,
        concurrency=args.concurrency,
        rounds=args.rounds or (ROUNDS if peer or constraint else 1),
        peer=peer,
        constraint=constraint,
    )
    report.print()
    if args.json is not None:
        report.save(args.json)
    return int(report.peer is not None and report.peer.problem is not None)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value
