"""``paged-backend bench quality``: what a number format costs, compared with float32."""

from __future__ import annotations

import argparse

from paged_backend.cli.bench.options import (
    add_count,
    add_json,
    add_threads,
    command_line,
    use_threads,
)
from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.tools.bench.quality_options import PromptOptions
from paged_backend.values.flags import add_flags, flag_values


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "quality",
        help="what a number format costs in quality, compared with float32",
        description="Answer prompts greedily twice in this process: with the options as they are "
        "given, and with a reference, which has the same checkpoint and options but dtype float32, "
        "no quantization and kv_cache_dtype auto. Then compare the distributions of both engines "
        "over the vocabulary at each token of the reference's answers. The reference of a "
        "quantized checkpoint has the same weights, dequantized to float32, with two exceptions: "
        "where the platform multiplies in W8A8, the reference rounds activations, too, and "
        "it stores keys and values in the format that the checkpoint names. Both engines are in "
        "memory at once. By default --max-model-len is what the longest prompt and answer need.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("prompts")
    add_flags(group, PromptOptions)
    add_count(group, "--concurrency", 16, "prompts at once")
    add_threads(group)
    add_json(group, "the figures")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.quality import QualityBench

    prompts = PromptOptions(**flag_values(args, PromptOptions))
    use_threads(args)
    bench = QualityBench(engine_options(args), prompts)
    report = bench.run(concurrency=args.concurrency, command=command_line())
    report.print()
    if args.json is not None:
        report.save(args.json)
    return 0
