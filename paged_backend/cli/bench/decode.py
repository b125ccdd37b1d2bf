"""``paged-backend bench decode``: steady decoding, compared with the roofline and a peer."""

from __future__ import annotations

import argparse

from paged_backend.cli.bench.options import (
    add_count,
    add_counts,
    add_json,
    positive,
    print_rows,
)
from paged_backend.cli.bench.peers import add_peer, chosen_peer
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.tools.bench.peer_options import PEERS
from paged_backend.values.errors import ConfigError


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "decode",
        help="steady decoding, compared with the roofline and with another engine",
        description="Time steps in which a whole batch decodes, beside the time that the device "
        "takes to read the weights and the KV cache, or to multiply by the weights where that is "
        "longer than reading them; then the gain of a cached prefix, first tokens, compilations "
        "after the warm-up, and how long the device is idle. With --peer vllm, vLLM runs the same "
        "batches and first tokens: after each batch of this engine if both engines fit in the "
        "device's memory (see --gpu-memory-utilization), and otherwise after all of them.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("workload")
    sizes = 1, 8, 32, 64, 128, 256
    add_counts(group, "--batch-sizes", sizes, "sequences that decode at once")
    add_counts(group, "--context", (1024, 8192), "tokens of each prompt")
    add_count(group, "--steps", 64, "timed steps")
    add_json(group, "the figures, as they come,")
    group.add_argument(
        "--simulate-device-ms",
        type=positive,
        help="run no model: each step takes a simulated device this long; prints how long it is "
        "idle and the host's time for a step",
    )
    group.add_argument(
        "--request-rate",
        type=positive,
        help="with --simulate-device-ms: prompts of 512 tokens that arrive per second, while as "
        "many sequences end",
    )
    names = [name for name, kind in PEERS.items() if kind.decodes]
    add_peer(parser, names, "with continuous batching, on one of the batches")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.simulate_device_ms is not None:
        return _run_simulated_device(args)
    if args.request_rate is not None:
        raise ConfigError("--request-rate: needs --simulate-device-ms")
    if args.peer == "transformers" and args.peer_python is not None:
        raise ConfigError("--peer-python: bench decode needs it only for --peer vllm")
    from paged_backend.tools.bench.decode import run_decode_bench

    report = run_decode_bench(
        engine_options(args),
        contexts=args.context,
        batch_sizes=args.batch_sizes,
        num_steps=args.steps,
        peer=chosen_peer(args),
        path=args.json,
    )
    report.print()
    return 0


def _run_simulated_device(args: argparse.Namespace) -> int:
    from paged_backend.tools.bench.simulated_device import SimulatedFigures, run_simulated_bench

    figures = run_simulated_bench(
        engine_options(args),
        step_s=args.simulate_device_ms / 1e3,
        contexts=args.context,
        batch_sizes=args.batch_sizes,
        num_steps=args.steps,
        request_rate=args.request_rate or 0.0,
    )
    print_rows(SimulatedFigures.HEADER, figures)
    return 0
