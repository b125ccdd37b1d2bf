"""``paged-backend bench speculation``: requests with speculation and without it."""

from __future__ import annotations

import argparse
import math

from paged_backend.cli.bench.options import add_turns, positive, print_turns, use_threads
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.tools.bench.speculation_traces import KINDS
from paged_backend.values import engine_args
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "speculation",
        help="what speculation gains, also on a simulated device",
        description="Generate answers that repeat themselves as real ones do (an edited document, "
        "JSON, code), and random ones, in turn with speculation and without it. The model "
        "is computed, and the tokens of these answers replace what it samples. On a simulated "
        "device, nothing is computed.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--traces",
        type=_traces,
        default=list(KINDS),
        help=f"kinds of answers (default: {','.join(KINDS)})",
    )
    group.add_argument(
        "--simulate-device-ms",
        type=positive,
        help="run no model: each step takes a simulated device this long, and steps are scheduled "
        "ahead as on a GPU; prints how long it is idle",
    )
    group.add_argument(
        "--simulate-pass-ms",
        type=positive,
        help="with --simulate-device-ms and the method draft_model or mtp: time of a pass, which "
        "draws one token of each sequence (default: 1)",
    )
    group.add_argument(
        "--draft-chance",
        type=_chance,
        help="with the method draft_model or mtp: chance that a draft is right if those before it "
        "are, whatever the draft model computes (default: 0.8)",
    )
    add_turns(group)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    config = engine_args.from_mapping(engine_options(args)).config
    use_threads(args)
    speculation = config.speculation()
    draws = speculation is not None and speculation.is_drawn_by_worker
    if args.draft_chance is not None and not draws:
        raise ConfigError("--draft-chance: needs the method draft_model or mtp")
    if args.simulate_pass_ms is not None and (args.simulate_device_ms is None or not draws):
        raise ConfigError(
            "--simulate-pass-ms: needs --simulate-device-ms and the method draft_model or mtp"
        )
    from paged_backend.tools.bench.speculation import DRAFT_CHANCE, HEADER, SpeculationBench

    chance = DRAFT_CHANCE if args.draft_chance is None else args.draft_chance
    if args.simulate_device_ms is not None:
        return _run_simulated_device(args, config, chance)
    bench = SpeculationBench(config, chance)
    return print_turns(args, HEADER, bench.measure(args.traces, args.concurrency, args.rounds))


def _run_simulated_device(args: argparse.Namespace, config: EngineConfig, chance: float) -> int:
    from paged_backend.tools.bench.simulated_device import SimulatedDrafts
    from paged_backend.tools.bench.simulated_speculation import (
        IDLE_HEADER,
        SimulatedSpeculationBench,
    )

    drafts = SimulatedDrafts((args.simulate_pass_ms or 1.0) / 1e3, chance)
    bench = SimulatedSpeculationBench(config, args.simulate_device_ms / 1e3, drafts)
    figures = bench.measure(args.traces, args.concurrency, args.rounds)
    return print_turns(args, IDLE_HEADER, figures)


def _chance(text: str) -> float:
    try:
        chance = float(text)
    except ValueError:
        chance = math.nan
    if not 0 <= chance <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, got {text!r}")
    return chance


def _traces(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(KINDS)}, got {name!r}")
    return names
