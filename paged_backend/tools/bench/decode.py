"""Measures steady decoding by the engine in this process, against the roofline of the device.

The speeds of memory and arithmetic are measured in the same run, by a copy and by a matrix product
in the model's dtype. If inputs of layers are quantized, their products are faster than the measured
one, and only bytes count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paged_backend.checkpoint.hub import is_gguf, resolve_checkpoint
from paged_backend.platforms.select import gpu_of
from paged_backend.tools.bench.decode_engine import (
    WARM_UP_STEPS,
    DecodeBench,
    compilations,
    first_token_prompts,
    free_memory,
    random_tokens,
)
from paged_backend.tools.bench.decode_peer import (
    DecodePeer,
    PeerReport,
    SteadyPeer,
    median_first_token_ms,
)
from paged_backend.tools.bench.decode_report import (
    HEADER,
    BatchResult,
    DecodeReport,
    GrowingReport,
)
from paged_backend.tools.bench.environment import environment
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.bench.peer_process import PeerSettings
from paged_backend.values import engine_args
from paged_backend.values.errors import ConfigError

# At the shortest context, the batch size nearest to this one is traced and given to transformers.
REFERENCE_BATCH = 32
# The limit for everything that a peer does. A CPU takes minutes to compile vLLM's kernels.
GPU_PEER_SECONDS, CPU_PEER_SECONDS = 150.0, 900.0
TRANSFORMERS_SECONDS = 120.0  # half of it for imports and loading the model
# A peer takes memory for activations, libraries and graphs, too, and keys and values in blocks.
PEER_WORKSPACE_BYTES = 12 * 2**30
PEER_MEMORY_SHARE = 0.95  # part of the GPU's free memory


class PeerSide:
    """Adds the figures of a peer that is loaded to the report.

    Args:
        in_turn: whether its turns come after each batch of the engine.
    """

    def __init__(
        self, name: str, peer: DecodePeer, report: GrowingReport, vocab_size: int, in_turn: bool
    ) -> None:
        self._peer, self._report, self._vocab_size = peer, report, vocab_size
        self._seed = report.value.options["seed"]
        self._rng = np.random.default_rng(self._seed)
        self._change(PeerReport(name, in_turn, peer.about))

    def add_row(self, row: BatchResult) -> None:
        """Measure a batch that the engine has measured."""
        if row.figures is None:
            return
        prompts = random_tokens(self._rng, self._vocab_size, row.batch_size, row.context)
        steps = self._report.value.timed_steps
        figures = self._peer.row(prompts, WARM_UP_STEPS, steps, row.figures.tokens_per_s)
        report = self._report.value.peer
        assert report is not None
        if figures is not None:
            print(figures.line(report.name), flush=True)
            report = replace(report, rows=[*report.rows, figures])
        self._change(report)

    def add_first_token(self, num_tokens: int) -> None:
        """Time first tokens that the engine has timed."""
        prompts = first_token_prompts(num_tokens, self._vocab_size, self._seed)
        peer_ms = median_first_token_ms(self._peer.first_token_ms, prompts)
        first_tokens = [
            first.compared(peer_ms) if first.num_tokens == num_tokens else first
            for first in self._report.value.first_tokens
        ]
        self._report.change(first_tokens=first_tokens)
        assert self._report.value.peer is not None
        self._change(self._report.value.peer)

    def _change(self, report: PeerReport) -> None:
        self._report.change(peer=replace(report, problem=self._peer.problem))


def run_decode_bench(
    options: Mapping[str, Any],
    *,
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    num_steps: int,
    peer: PeerOptions | None,
    path: Path | None = None,
) -> DecodeReport:
    """Measure, and print each row when it is complete.

    Each figure is saved to the file at `path` as soon as it is known, so that a run that is killed
    keeps the figures it has. A peer that is loaded takes its turn after each batch if both engines
    fit in the memory of the device, and after all of them otherwise.

    Raises:
        ConfigError: the options or the checkpoint cannot be used.
    """
    config = engine_args.from_mapping(options).config
    folder = resolve_checkpoint(config).model.resolve()
    if peer is not None and is_gguf(folder):
        raise ConfigError("GGUF files are measured without a peer: add --no-peer")
    if peer is not None:
        peer.interpreter()  # a mistyped path fails before minutes of work
    bench = DecodeBench(config, folder, num_steps)
    device, vocab_size = bench.device, bench.vocab_size
    report = _new_report(bench, folder, path)
    loaded = peer if peer is not None and peer.name != "transformers" else None
    settings = bench.peer_settings(folder, contexts, batch_sizes)
    print(HEADER, flush=True)
    with ExitStack() as stack:
        side = None
        if loaded is not None and _fits(settings, bench.roofline.weight_bytes, device):
            process = stack.enter_context(_loaded(loaded, settings, device))
            side = PeerSide(loaded.name, process, report, vocab_size, in_turn=True)
        with compilations(device) as compiled:
            report.change(compiled_after_warm_up=compiled)
            for row in bench.rows(contexts, batch_sizes):
                print(row.line(), flush=True)
                report.change(rows=[*report.value.rows, row])
                if side is not None:
                    side.add_row(row)
            report.change(prefix=bench.time_prefix())
            for num_tokens in bench.first_token_lengths(contexts):
                first = bench.time_first_tokens(num_tokens)
                report.change(first_tokens=[*report.value.first_tokens, first])
                if side is not None:
                    side.add_first_token(num_tokens)
            reference = _reference(report.value.rows)
            if reference is not None:
                idle = bench.trace_idle(reference.context, reference.batch_size)
                report.change(idle=idle)
    del bench
    free_memory(device)
    if loaded is not None and side is None:
        with _loaded(loaded, settings, device) as process:
            _run_after(loaded.name, process, report, vocab_size)
    elif peer is not None and loaded is None and reference is not None:
        with SteadyPeer(peer, settings, TRANSFORMERS_SECONDS) as process:
            name = "transformers' continuous batching"
            side = PeerSide(name, process, report, vocab_size, in_turn=False)
            side.add_row(reference)
    report.change(complete=True)
    return report.value


def _new_report(bench: DecodeBench, folder: Path, path: Path | None) -> GrowingReport:
    roofline, dtype = bench.roofline, str(bench.dtype).removeprefix("torch.")
    report = DecodeReport(
        complete=False,
        model=folder.name,
        options=bench.options,
        copy_bytes_per_s=roofline.bytes_per_s,
        matmul_flops_per_s=bench.matmul_rate,
        weight_bytes_per_step=roofline.weight_bytes,
        kv_bytes_per_token=roofline.kv_bytes_per_token,
        timed_steps=bench.num_steps,
        environment=environment(bench.device),
    )
    growing = GrowingReport(report, path)
    print(
        f"bench decode: {folder.name} in {dtype}, copies move "
        f"{roofline.bytes_per_s / 1e12:.3f} TB/s, products make "
        f"{bench.matmul_rate / 1e12:.4g} TFLOP/s"
    )
    return growing


def _fits(settings: PeerSettings, weight_bytes: int, device: torch.device) -> bool:
    """Return True if a peer fits in the memory that the engine left free; always on a CPU."""
    gpu = gpu_of(device)
    if gpu is None:
        return True
    free, _ = gpu.free_and_total_bytes
    return free * PEER_MEMORY_SHARE >= weight_bytes + settings.kv_bytes + PEER_WORKSPACE_BYTES


def _loaded(options: PeerOptions, settings: PeerSettings, device: torch.device) -> DecodePeer:
    """Load a peer; on a GPU, into the memory that is free now."""
    print(f"{options.name} is loading", flush=True)
    gpu = gpu_of(device)
    if gpu is None:
        return DecodePeer(options, settings, CPU_PEER_SECONDS)
    free, total = gpu.free_and_total_bytes
    share = round(PEER_MEMORY_SHARE * free / total, 3)
    return DecodePeer(options, replace(settings, memory_share=share), GPU_PEER_SECONDS)


def _run_after(name: str, process: DecodePeer, report: GrowingReport, vocab_size: int) -> None:
    """Measure a peer on all batches and first tokens that the engine has measured."""
    side = PeerSide(name, process, report, vocab_size, in_turn=False)
    for row in report.value.rows:
        side.add_row(row)
    for first in report.value.first_tokens:
        side.add_first_token(first.num_tokens)


def _reference(rows: Iterable[BatchResult]) -> BatchResult | None:
    """The row measured at the shortest context with the batch size nearest `REFERENCE_BATCH`."""
    measured = [row for row in rows if row.figures is not None]
    return min(
        measured,
        key=lambda row: (row.context, abs(row.batch_size - REFERENCE_BATCH)),
        default=None,
    )
