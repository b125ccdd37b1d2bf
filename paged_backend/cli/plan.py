"""``paged-backend plan``: the GPUs a model needs and what they can give, by config.json alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.cli.options import Subparsers
from paged_backend.tools.plan.options import PlanOptions
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.flags import add_flags, flag_values

if TYPE_CHECKING:
    from paged_backend.tools.plan.planner import Plan

_ENGINE_FLAGS = (
    *("block_size", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"),
)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "plan", help="what GPUs a model needs and what they can give", description=__doc__
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json, the file itself, a Hugging Face id, or a bundled shape "
        "such as llama-3-8b",
    )
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="NAME",
        help="a GPU, or one described as NAME=GIB:GB/S:TFLOPS; may be repeated (default: h200)",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="MONEY",
        help="for an hour of one GPU; once, or once for each --gpu",
    )
    add_flags(parser.add_argument_group("plan"), PlanOptions)
    others = [spec.name for spec in fields(EngineConfig) if spec.name not in _ENGINE_FLAGS]
    add_flags(parser.add_argument_group("engine"), EngineConfig, leave_out=others)
    parser.add_argument(
        "--from-results",
        type=Path,
        metavar="FILE",
        help="results of `paged-backend bench` on the one --gpu, to compare with its roofline",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from paged_backend.tools.plan.gpus import find_gpu
    from paged_backend.tools.plan.measured import read_measurements
    from paged_backend.tools.plan.planner import make_plan
    from paged_backend.tools.plan.prices import read_prices

    gpus = [find_gpu(name) for name in args.gpu or ["h200"]]
    if args.from_results is not None and len(gpus) > 1:
        raise ConfigError("--from-results: give the one --gpu that the results were measured on")
    plan = make_plan(
        args.model,
        PlanOptions(**flag_values(args, PlanOptions)),
        EngineConfig(**{name: getattr(args, name) for name in _ENGINE_FLAGS}),
        gpus,
        read_prices(args.price, len(gpus)),
        [] if args.from_results is None else read_measurements(args.from_results),
    )
    if args.json:
        print(json.dumps(_values_of(plan), indent=1))
        return 0
    from rich.console import Console

    from paged_backend.tools.plan.tables import print_plan

    print_plan(plan, Console())
    return 0


def _values_of(plan: Plan) -> dict[str, Any]:
    """Return the plan for JSON; of the model's variant, it has what changes the plan."""
    values = asdict(plan)
    shape = values["model"]["shape"]
    del shape["variant"]
    shape["windows"] = plan.model.shape.windows
    return values
