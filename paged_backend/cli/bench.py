"""``paged-backend bench``: measure the engine, against a peer on the same work and the device.

The measurements of a running server belong to the load tester, and other packages may add more: an
entry point of the group `paged_backend.bench` names a module with a function ``add_parser``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.tools.bench.peer_options import DTYPES as PEER_DTYPES
from paged_backend.tools.bench.peer_options import PEERS, PeerOptions
from paged_backend.tools.bench.quality_options import PromptOptions
from paged_backend.tools.workloads.options import WorkloadOptions
from paged_backend.values import engine_args
from paged_backend.values.errors import ConfigError
from paged_backend.values.flags import add_flags, flag_values

if TYPE_CHECKING:
    from paged_backend.tools.bench.in_turn import Figures

GROUP = "paged_backend.bench"
ROUNDS = 5  # rounds of a comparison

_TRACES = ("edit", "json", "code", "random")
"""What `bench speculation` generates, of `tools/bench/speculation_traces.py`."""

_RANKS = [4, 8, 8, 8, 16, 16, 16, 16]
"""The ranks of the adapters of `bench adapters`."""

_OFFLINE = {"prompt_format": "ids", "ignore_eos": True, "trace_speedup": 1.0}
"""Workload options that are fixed because there is no server."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "bench", help="measure speed, alone or compared with another engine", description=__doc__
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    _add_offline(kinds)
    _add_decode(kinds)
    _add_host(kinds)
    _add_quality(kinds)
    _add_experts(kinds)
    _add_states(kinds)
    _add_speculation(kinds)
    _add_adapters(kinds)
    _add_beams(kinds)
    for entry in entry_points(group=GROUP):
        entry.load().add_parser(kinds)


def _add_offline(kinds: Subparsers) -> None:
    offline = kinds.add_parser(
        "offline",
        help="the engine in this process, compared with another engine",
        description="Measure the engine in this process and another one in a separate process, "
        "in turn: a workload, one request alone, the first token of a long prompt, and requests "
        "with a common prefix. Prompts are token ids, and the end-of-sequence token is ignored. "
        "--seed is the workload's, too; arrival times do not count.",
    )
    add_engine_options(offline)
    group = offline.add_argument_group("workload")
    add_flags(group, WorkloadOptions, leave_out=["seed", *_OFFLINE])
    group.add_argument(
        "--concurrency", type=_count, default=16, help="requests at once (default: 16)"
    )
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
    group.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    group.add_argument("--json", type=Path, help="write the figures of all rounds there, too")
    _add_offline_peer(offline)
    offline.set_defaults(run=run_offline, **_OFFLINE)


def _add_peer_choice(
    parser: argparse.ArgumentParser, names: Iterable[str], default: str
) -> argparse._ArgumentGroup:
    """Add the options that name a peer and its interpreter; `default` describes transformers."""
    group = parser.add_argument_group("peer")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--peer",
        choices=names,
        default="transformers",
        help=f"the engine to compare with (default: transformers, {default})",
    )
    choice.add_argument(
        "--no-peer", dest="peer", action="store_const", const=None, help="compare with nothing"
    )
    group.add_argument(
        "--peer-python",
        metavar="PATH",
        help="the interpreter of the peer's environment (default for transformers: this one)",
    )
    return group


def _add_offline_peer(offline: argparse.ArgumentParser) -> None:
    group = _add_peer_choice(offline, PEERS, "in static batches")
    group.add_argument(
        "--peer-dtype",
        choices=PEER_DTYPES,
        help="the peer's number format (default: the engine's); int8 rounds weights only",
    )
    group.add_argument(
        "--rounds",
        type=_count,
        help=f"times that everything is measured (default: {ROUNDS} with a peer or with "
        "--structured-outputs, otherwise 1)",
    )


def _add_decode(kinds: Subparsers) -> None:
    decode = kinds.add_parser(
        "decode",
        help="steady decoding, compared with the roofline and with another engine",
        description="Time steps in which a whole batch decodes, beside the time that the device "
        "takes to read the weights and the KV cache, or to multiply by the weights where that is "
        "longer than reading them; then the gain of a cached prefix, first tokens, compilations "
        "after the warm-up, and how long the device is idle. With --peer vllm, vLLM runs the same "
        "batches and first tokens: after each batch of this engine if both engines fit in the "
        "device's memory (see --gpu-memory-utilization), and otherwise after all of them.",
    )
    add_engine_options(decode)
    group = decode.add_argument_group("workload")
    group.add_argument(
        "--batch-sizes",
        type=_counts,
        default=[1, 8, 32, 64, 128, 256],
        help="sequences that decode at once (default: 1,8,32,64,128,256)",
    )
    group.add_argument(
        "--context",
        type=_counts,
        default=[1024, 8192],
        help="tokens of each prompt (default: 1024,8192)",
    )
    group.add_argument("--steps", type=_count, default=64, help="timed steps (default: 64)")
    group.add_argument("--json", type=Path, help="write the figures there, too, as they come")
    group.add_argument(
        "--simulate-device-ms",
        type=_positive,
        help="run no model: each step takes a simulated device this long; prints how long it is "
        "idle and the host's time for a step",
    )
    group.add_argument(
        "--request-rate",
        type=_positive,
        help="with --simulate-device-ms: prompts of 512 tokens that arrive per second, while as "
        "many sequences end",
    )
    names = [name for name, kind in PEERS.items() if kind.decodes]
    _add_peer_choice(decode, names, "with continuous batching, on one of the batches")
    decode.set_defaults(run=run_decode)


def _add_host(kinds: Subparsers) -> None:
    host = kinds.add_parser(
        "host",
        help="the host's time for a decode step, without a model",
        description="Time scheduling, messages and input arrays of decode steps, in processor "
        "time. The sequences exist, and no model runs.",
    )
    host.add_argument("--batch-sizes", type=_counts, default=[64, 256], help="default: 64,256")
    host.add_argument(
        "--context", type=_counts, default=[128, 8000], help="tokens of each prompt (128,8000)"
    )
    host.add_argument("--steps", type=_count, default=75, help="timed steps (default: 75)")
    host.set_defaults(run=run_host)


def _add_experts(kinds: Subparsers) -> None:
    experts = kinds.add_parser(
        "experts",
        help="a CPU's products of experts, compared with reading their weights",
        description="Time the experts of one mixture-of-experts layer in processor time, in turn "
        "with reading as many bytes as the chosen experts have. Weights, rows and choices are "
        "random. The default sizes are Qwen3-30B-A3B's.",
    )
    experts.add_argument("--num-experts", type=_count, default=128, help="default: 128")
    experts.add_argument("--num-experts-per-tok", type=_count, default=8, help="default: 8")
    experts.add_argument("--hidden-size", type=_count, default=2048, help="default: 2048")
    experts.add_argument("--intermediate-size", type=_count, default=768, help="default: 768")
    experts.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    experts.add_argument("--batch-sizes", type=_counts, default=[1, 16, 64], help="(1,16,64)")
    experts.add_argument("--rounds", type=_count, default=15, help="timed rounds (default: 15)")
    experts.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    experts.set_defaults(run=run_experts)


def _add_states(kinds: Subparsers) -> None:
    states = kinds.add_parser(
        "states",
        help="a CPU's functions on states of sequences, compared with scaling the states in place",
        description="Time the functions of layers that keep a state per sequence in processor "
        "time, for decodes and one prompt, in turn with multiplying as many numbers in place on "
        "one thread. The convolution and the gated delta rule have the sizes of a layer of "
        "Qwen3-Next-80B-A3B, and the selective scan those of NVIDIA-Nemotron-Nano-9B-v2.",
    )
    states.add_argument("--batch-sizes", type=_counts, default=[1, 16], help="decodes (1,16)")
    states.add_argument("--prompt", type=_count, default=256, help="rows (default: 256)")
    states.add_argument("--rounds", type=_count, default=15, help="timed rounds (default: 15)")
    states.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    states.set_defaults(run=run_states)


def _add_speculation(kinds: Subparsers) -> None:
    speculation = kinds.add_parser(
        "speculation",
        help="what speculation gains on a CPU",
        description="Generate answers that repeat themselves as real ones do (an edited document, "
        "JSON, code), and random ones, in turn with speculation and without it. The model "
        "is computed, and the tokens of these answers replace what it samples. On a CPU only.",
    )
    add_engine_options(speculation)
    group = speculation.add_argument_group("workload")
    group.add_argument(
        "--traces",
        type=_traces,
        default=list(_TRACES),
        help=f"kinds of answers (default: {','.join(_TRACES)})",
    )
    _add_turns(group)
    speculation.set_defaults(run=run_speculation)


def run_speculation(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.speculation import HEADER, SpeculationBench

    _use_threads(args)
    bench = SpeculationBench(engine_args.from_mapping(engine_options(args)).config)
    return _print_turns(args, HEADER, bench.measure(args.traces, args.concurrency, args.rounds))


def _add_adapters(kinds: Subparsers) -> None:
    adapters = kinds.add_parser(
        "adapters",
        help="what LoRA adapters cost on a CPU",
        description="Generate 128 tokens of random prompts, in turn without LoRA, with LoRA "
        "enabled for requests without adapters, and for requests that name adapters with random "
        "weights in turns. Two engines are in memory at once. On a CPU only.",
    )
    add_engine_options(adapters)
    group = adapters.add_argument_group("workload")
    group.add_argument(
        "--ranks",
        type=_counts,
        default=_RANKS,
        help=f"the rank of each adapter (default: {','.join(map(str, _RANKS))})",
    )
    _add_turns(group)
    adapters.set_defaults(run=run_adapters)


def run_adapters(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.adapters import HEADER, AdaptersBench

    _use_threads(args)
    config = engine_args.from_mapping(engine_options(args)).config
    bench = AdaptersBench(config, args.ranks)
    return _print_turns(args, HEADER, bench.measure(args.concurrency, args.rounds))


def _add_beams(kinds: Subparsers) -> None:
    beams = kinds.add_parser(
        "beams",
        help="what a beam search costs on a CPU",
        description="Generate 128 tokens of random prompts with a beam search, and as many samples "
        "of the same length with the same engine, in turn. On a CPU only.",
    )
    add_engine_options(beams)
    group = beams.add_argument_group("workload")
    group.add_argument(
        "--beam-widths",
        type=_counts,
        default=[4],
        help="beams of a request, each at most max_beam_width (default: 4)",
    )
    _add_turns(group)
    beams.set_defaults(run=run_beams)


def run_beams(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.beams import HEADER, BeamsBench

    _use_threads(args)
    bench = BeamsBench(engine_args.from_mapping(engine_options(args)).config)
    return _print_turns(
        args, HEADER, bench.measure(args.beam_widths, args.concurrency, args.rounds)
    )


def _add_turns(group: argparse._ArgumentGroup) -> None:
    """Add the options of benchmarks that run requests in turn with others."""
    group.add_argument(
        "--concurrency", type=_counts, default=[1, 4, 16], help="requests at once (default: 1,4,16)"
    )
    group.add_argument("--rounds", type=_count, default=ROUNDS, help=f"rounds (default: {ROUNDS})")
    group.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    group.add_argument("--json", type=Path, help="write the figures of all rounds there, too")


def _use_threads(args: argparse.Namespace) -> None:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)


def _print_turns(args: argparse.Namespace, header: str, figures: Iterable[Figures]) -> int:
    """Print each row of figures as soon as it is there, and save all of them."""
    from paged_backend.tools.bench.in_turn import save

    print(header)
    rows = []
    for row in figures:
        rows.append(row)
        print(row.line(), flush=True)
    if args.json is not None:
        save(args.json, rows, shlex.join(["paged-backend", *sys.argv[1:]]))
    return 0


def _add_quality(kinds: Subparsers) -> None:
    quality = kinds.add_parser(
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
    add_engine_options(quality)
    group = quality.add_argument_group("prompts")
    add_flags(group, PromptOptions)
    group.add_argument(
        "--concurrency", type=_count, default=16, help="prompts at once (default: 16)"
    )
    group.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")
    group.add_argument("--json", type=Path, help="write the figures there, too")
    quality.set_defaults(run=run_quality)


def run_quality(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.quality import QualityBench

    prompts = PromptOptions(**flag_values(args, PromptOptions))
    bench = QualityBench(engine_options(args), prompts, threads=args.threads)
    command = shlex.join(["paged-backend", *sys.argv[1:]])
    report = bench.run(concurrency=args.concurrency, command=command)
    report.print()
    if args.json is not None:
        report.save(args.json)
    return 0


def run_host(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.host import measure_host

    print("batch  context  schedule  prepare  update  messages  total (ms per step)")
    for context in args.context:
        for batch_size in args.batch_sizes:
            row = measure_host(batch_size, context, args.steps)
            print(
                f"{batch_size:5}  {context:7}  {row.schedule_ms:8.3f}  {row.prepare_ms:7.3f}  "
                f"{row.update_ms:6.3f}  {row.messages_ms:8.3f}  {row.total_ms:5.3f}"
            )
    return 0


def run_experts(args: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from paged_backend.tools.bench.experts import ExpertsSizes, measure_experts

    if args.num_experts_per_tok > args.num_experts:
        raise ConfigError(
            f"--num-experts-per-tok must be at most {args.num_experts} (--num-experts), got "
            f"{args.num_experts_per_tok}"
        )
    if args.threads:
        torch.set_num_threads(args.threads)
    names = "num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size", "dtype"
    sizes = ExpertsSizes(**{name: getattr(args, name) for name in names})
    print(" rows  experts       MB  compute  read (ms)  ratio")
    for row in measure_experts(sizes, args.batch_sizes, args.rounds):
        print(
            f"{row.rows:5}  {row.chosen:7}  {row.megabytes:7.1f}  {row.compute_ms:7.2f}  "
            f"{row.read_ms:9.2f}  {row.ratio:5.2f}"
        )
    return 0


def run_states(args: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from paged_backend.tools.bench.states import measure_states

    if args.threads:
        torch.set_num_threads(args.threads)
    print("function        sequences   rows       MB  compute  scale (ms)  ratio  us per row")
    for row in measure_states(args.batch_sizes, args.prompt, args.rounds):
        print(
            f"{row.function:14}  {row.sequences:9}  {row.rows:5}  {row.megabytes:7.1f}  "
            f"{row.compute_ms:7.2f}  {row.scale_ms:10.2f}  {row.ratio:5.2f}  "
            f"{row.compute_ms / row.rows * 1e3:10.1f}"
        )
    return 0


def run_offline(args: argparse.Namespace) -> int:
    """Measure and print."""
    from paged_backend.tools.bench.constrained import Constraint
    from paged_backend.tools.bench.offline import OfflineBench

    constraint = None
    if args.structured_outputs is not None:
        constraint = Constraint(args.structured_outputs, args.structured_output_ratio)
    workload = WorkloadOptions(**flag_values(args, WorkloadOptions))
    peer = _peer_options(args)
    bench = OfflineBench(engine_options(args), threads=args.threads)
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


def _peer_options(args: argparse.Namespace) -> PeerOptions | None:
    """Return the peer to measure, None for no peer.

    Raises:
        ConfigError: the options do not fit together.
    """
    if args.peer is not None:
        return PeerOptions(args.peer, args.peer_python, args.peer_dtype)
    for flag, value in (("--peer-python", args.peer_python), ("--peer-dtype", args.peer_dtype)):
        if value is not None:
            raise ConfigError(f"{flag}: cannot be used with --no-peer")
    return None


def run_decode(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.simulate_device_ms is not None:
        return _run_simulated_device(args)
    if args.request_rate is not None:
        raise ConfigError("--request-rate: needs --simulate-device-ms")
    from paged_backend.tools.bench.decode import run_decode_bench

    report = run_decode_bench(
        engine_options(args),
        contexts=args.context,
        batch_sizes=args.batch_sizes,
        num_steps=args.steps,
        peer=_decode_peer(args),
        path=args.json,
    )
    report.print()
    return 0


def _decode_peer(args: argparse.Namespace) -> PeerOptions | None:
    """Return the peer to measure, None for no peer.

    Raises:
        ConfigError: the options do not fit together.
    """
    if args.peer not in (None, "transformers"):
        return PeerOptions(args.peer, args.peer_python)
    if args.peer_python is not None:
        raise ConfigError("--peer-python: bench decode needs it only for --peer vllm")
    return None if args.peer is None else PeerOptions(args.peer)


def _run_simulated_device(args: argparse.Namespace) -> int:
    from paged_backend.tools.bench.simulated_device import SimulatedFigures, run_simulated_bench

    print(SimulatedFigures.HEADER)
    for figures in run_simulated_bench(
        engine_options(args),
        step_s=args.simulate_device_ms / 1e3,
        contexts=args.context,
        batch_sizes=args.batch_sizes,
        num_steps=args.steps,
        request_rate=args.request_rate or 0.0,
    ):
        print(figures.line(), flush=True)
    return 0


def _counts(text: str) -> list[int]:
    """Parse whole numbers of at least 1, separated by commas."""
    return [_count(part) for part in text.split(",")]


def _traces(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in _TRACES:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(_TRACES)}, got {name!r}")
    return names


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be from 1, got {value}")
    return value
