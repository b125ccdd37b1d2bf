"""Measures steady decoding by the engine in this process, against the roofline of the device.

The speeds of memory and arithmetic are measured in the same run, by a copy and by a matrix product
in the model's dtype. If inputs of layers are quantized, their products are faster than the measured
one, and only bytes count.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from paged_backend.checkpoint.hub import is_gguf, resolve_checkpoint
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.platforms.select import gpu_of, is_gpu
from paged_backend.tools.bench.continuous_peer import PeerCase, run_peer
from paged_backend.tools.bench.decode_peer import (
    FIRST_TOKEN_LENGTHS,
    REPEATS,
    DecodePeer,
    FirstToken,
    PeerReport,
    PeerRow,
    median_first_token_ms,
)
from paged_backend.tools.bench.decode_report import (
    HEADER,
    TRACED_STEPS,
    BatchResult,
    DecodeFigures,
    DecodeReport,
    GrowingReport,
    IdleShare,
)
from paged_backend.tools.bench.decode_roofline import DecodeRoofline
from paged_backend.tools.bench.device_trace import device_gaps, traced
from paged_backend.tools.bench.environment import copy_bandwidth, environment, matmul_rate
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.bench.peer_process import PeerSettings
from paged_backend.tools.bench.prefix import PrefixFigures, time_prefix
from paged_backend.tools.bench.requests import drain, first_token_ms, greedy
from paged_backend.values import engine_args
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError

WARM_UP_STEPS = 8
PREFIX_TOKENS = 2048
# At the shortest context, the batch size nearest to this one is traced and given to transformers.
REFERENCE_BATCH = 32
# The limit for everything that a peer does. A CPU takes minutes to compile vLLM's kernels.
GPU_PEER_SECONDS, CPU_PEER_SECONDS = 150.0, 900.0
TRANSFORMERS_SECONDS = 120.0  # half of it for imports and loading the model
# A peer takes memory for activations, libraries and graphs, too, and keys and values in blocks.
PEER_WORKSPACE_BYTES = 12 * 2**30
PEER_BLOCK = 128  # tokens, at most
PEER_MEMORY_SHARE = 0.95  # part of the GPU's free memory


class DecodeBench:
    """Makes the measurements on one engine."""

    def __init__(self, config: EngineConfig, folder: Path, num_steps: int) -> None:
        self._config = config
        worker = open_executor(config, folder)
        self._engine = Engine(config, worker)
        self._limits = worker.info.step_limits
        self.options = asdict(config) | asdict(self._limits)
        self.num_steps = num_steps
        self._seed = config.seed
        self._rng = np.random.default_rng(config.seed)
        self._num_requests = 0
        self.vocab_size = self._engine.limits.vocab_size
        self.device, self.dtype = worker.platform.device, worker.platform.dtype
        info = worker.info
        rounds_inputs = any(form.startswith("W8A8") for form in info.weight_forms)
        self.matmul_rate = matmul_rate(self.device, self.dtype)
        self.roofline = DecodeRoofline(
            load_model_config(folder),
            self.dtype,
            copy_bandwidth(self.device),
            math.inf if rounds_inputs else self.matmul_rate,
            held_bytes=info.weight_bytes if info.weight_forms else None,
            kv_bytes_per_token=info.kv_bytes_per_token,
        )
        _free_memory(self.device)

    def rows(self, contexts: Iterable[int], batch_sizes: Sequence[int]) -> Iterator[BatchResult]:
        """Measure each batch at each context, on prompts that share nothing."""
        for context, batch_size in itertools.product(contexts, batch_sizes):
            problem = self._misfit(context, batch_size)
            if problem is not None:
                yield BatchResult(context, batch_size, problem=f"does not fit: {problem}")
                continue
            with self._decoding(context, batch_size):
                yield self._time_steps(context, batch_size)

    def first_token_lengths(self, contexts: Iterable[int]) -> list[int]:
        """The lengths of prompts whose first tokens are timed: up to the longest context."""
        longest = min(max(contexts), self._engine.limits.max_model_len - 1)
        return [length for length in FIRST_TOKEN_LENGTHS if length <= longest]

    def time_first_tokens(self, num_tokens: int) -> FirstToken:
        """Time the first token of prompts that share nothing, each alone."""
        prompts = first_token_prompts(num_tokens, self.vocab_size, self._seed)
        engine_ms = median_first_token_ms(partial(first_token_ms, self._engine), prompts)
        assert engine_ms is not None
        return FirstToken(num_tokens, engine_ms)

    def peer_settings(
        self, folder: Path, contexts: Iterable[int], batch_sizes: Sequence[int]
    ) -> PeerSettings:
        """What a peer needs for the batches that fit this engine."""
        limits, max_model_len = self._limits, self._engine.limits.max_model_len
        kv_tokens = 2 * max_model_len  # a peer may hold back some blocks
        for context, batch_size in itertools.product(contexts, batch_sizes):
            if self._misfit(context, batch_size) is None:
                grown = growth(context, batch_size, limits.max_num_batched_tokens, self.num_steps)
                kv_tokens = max(kv_tokens, batch_size * (context + grown + PEER_BLOCK))
        return PeerSettings(
            folder=str(folder),
            load_format=self._config.load_format,
            device=str(self.device),
            dtype=self._engine.executor.info.dtype,
            threads=torch.get_num_threads(),
            max_model_len=max_model_len,
            max_seqs=limits.max_num_seqs,
            longest=max_model_len,
            kv_bytes=(kv_tokens + PEER_BLOCK) * self.roofline.kv_bytes_per_token,
            quantization=self._config.quantization,
            kv_cache_dtype=self._config.kv_cache_dtype,
            prefix_caching=False,
            max_batched_tokens=limits.max_num_batched_tokens,
        )

    def time_prefix(self) -> PrefixFigures | None:
        """Measure the gain of a cached prefix."""
        return time_prefix(self._engine, self._config, PREFIX_TOKENS, self._rng)

    def trace_idle(self, context: int, batch_size: int) -> IdleShare | None:
        """Trace steps of a batch that fits; None without a GPU or if tracing fails."""
        if not is_gpu(self.device):
            return None
        with self._decoding(context, batch_size):
            try:
                events = traced(self._engine.step, warm_up=WARM_UP_STEPS, num_steps=TRACED_STEPS)
            except (RuntimeError, AssertionError, ValueError) as error:
                print(f"no trace: {error}")  # not every machine permits tracing of its device
                return None
        gaps = device_gaps(events)
        return None if gaps is None else IdleShare(batch_size, context, *gaps)

    def _misfit(self, context: int, batch_size: int) -> str | None:
        """The reason why the batch cannot decode all at once; None if it can."""
        max_num_batched_tokens = self._limits.max_num_batched_tokens
        longest = context + growth(context, batch_size, max_num_batched_tokens, self.num_steps)
        if batch_size > self._limits.max_num_seqs:
            return f"max_num_seqs is {self._limits.max_num_seqs}"
        max_model_len = self._engine.limits.max_model_len
        if longest >= max_model_len:
            return f"grows to {longest} tokens, max_model_len is {max_model_len}"
        num_blocks = self._engine.stats().num_blocks
        layout = self._engine.executor.info.kv_layout
        usable = num_blocks - num_blocks // 100  # the scheduler holds back 1% of the blocks
        fitting = layout.num_sequences(usable, longest)
        if fitting < batch_size:
            return f"only {fitting} fit in the KV blocks, there are {num_blocks}"
        return None

    @contextmanager
    def _decoding(self, context: int, batch_size: int) -> Iterator[None]:
        """Provide a batch of prompts of `context` tokens that has decoded its warm-up steps."""
        engine = self._engine
        names = [self._submit(tokens) for tokens in self._tokens(batch_size, context)]
        begun: set[str] = set()
        try:
            label = f"{batch_size} x {context}"
            with tqdm(total=batch_size, desc=label, leave=False, disable=None) as bar:
                while len(begun) < batch_size:
                    begun.update(output.request_id for output in engine.step())
                    bar.update(len(begun) - bar.n)
            for _ in range(WARM_UP_STEPS):
                engine.step()
            yield
        finally:
            for name in names:
                engine.abort_request(name)
            drain(engine)

    def _num_tokens(self) -> int:
        """The number of tokens before the next one, of all sequences together."""
        return sum(
            sequence.num_computed_tokens for sequence in self._engine.scheduler.view().sequences
        )

    def _time_steps(self, context: int, batch_size: int) -> BatchResult:
        """Time the steps of a batch that is decoding."""
        engine = self._engine
        tokens_before = self._num_tokens()
        times, fewest = [time.perf_counter()], batch_size
        for _ in range(self.num_steps):
            fewest = min(fewest, len(engine.step()))
            times.append(time.perf_counter())
        if fewest < batch_size:
            return BatchResult(context, batch_size, problem=f"a step decoded only {fewest}")
        kv_tokens = (tokens_before + self._num_tokens()) // 2
        mean = (times[-1] - times[0]) / self.num_steps
        least = self.roofline.step_seconds(batch_size, kv_tokens)
        step_seconds = statistics.median(b - a for a, b in itertools.pairwise(times))
        return BatchResult(
            context,
            batch_size,
            DecodeFigures(
                tokens_per_s=batch_size / mean,
                step_ms=step_seconds * 1e3,
                kv_tokens=kv_tokens,
                roofline_ms=least * 1e3,
                of_roofline=least / mean,
            ),
        )

    def _submit(self, tokens: list[int]) -> str:
        self._num_requests += 1
        self._engine.add_request(greedy(str(self._num_requests), tokens))
        return str(self._num_requests)

    def _tokens(self, rows: int, columns: int) -> list[list[int]]:
        return random_tokens(self._rng, self.vocab_size, rows, columns)


def growth(context: int, batch_size: int, max_num_batched_tokens: int, num_steps: int) -> int:
    """The most tokens that the first sequence may generate, including while others begin."""
    per_step = max(1, max_num_batched_tokens - batch_size)
    most_steps = max(num_steps, WARM_UP_STEPS + TRACED_STEPS)
    return -(-batch_size * context // per_step) + WARM_UP_STEPS + most_steps + 4


def random_tokens(
    rng: np.random.Generator, vocab_size: int, rows: int, columns: int
) -> list[list[int]]:
    """`rows` prompts of `columns` random tokens."""
    tokens: list[list[int]] = rng.integers(vocab_size, size=(rows, columns)).tolist()
    return tokens


def first_token_prompts(num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """The prompts whose first tokens are timed, the same for each engine; the first warms up."""
    rng = np.random.default_rng((seed, num_tokens))
    return random_tokens(rng, vocab_size, 1 + REPEATS, num_tokens)


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
    device, dtype, vocab_size = bench.device, bench.dtype, bench.vocab_size
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
    _free_memory(device)
    if loaded is not None and side is None:
        with _loaded(loaded, settings, device) as process:
            _run_after(loaded.name, process, report, vocab_size)
    elif peer is not None and loaded is None and reference is not None:
        case = PeerCase(
            folder=str(folder),
            load_format=config.load_format,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            context=reference.context,
            batch_size=reference.batch_size,
            seed=config.seed,
        )
        _run_transformers(case, reference, report)
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


def _run_transformers(case: PeerCase, reference: BatchResult, report: GrowingReport) -> None:
    """Measure transformers' continuous batching on one batch."""
    result = run_peer(case, TRANSFORMERS_SECONDS)
    peer = PeerReport("transformers' continuous batching", False, problem=result.problem)
    if result.tokens_per_s is not None:
        assert reference.figures is not None and result.attention is not None
        ratio = reference.figures.tokens_per_s / result.tokens_per_s
        row = PeerRow(result.context, result.batch_size, result.tokens_per_s, None, ratio)
        peer = replace(peer, about={"attention": result.attention}, rows=[row])
        print(row.line(peer.name))
    report.change(peer=peer)


@contextmanager
def compilations(device: torch.device) -> Iterator[list[str] | None]:
    """Collect the names of Triton kernels compiled inside the context; None on a CPU."""
    if not is_gpu(device):
        yield None
        return
    from triton import knobs

    names: list[str] = []

    def note(**compiled: Any) -> None:
        names.append(compiled["fn"].name)

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def _reference(rows: Iterable[BatchResult]) -> BatchResult | None:
    """The row measured at the shortest context with the batch size nearest `REFERENCE_BATCH`."""
    measured = [row for row in rows if row.figures is not None]
    return min(
        measured,
        key=lambda row: (row.context, abs(row.batch_size - REFERENCE_BATCH)),
        default=None,
    )


def _free_memory(device: torch.device) -> None:
    """Return the memory of deleted objects to the device."""
    gc.collect()
    gpu = gpu_of(device)
    if gpu is not None:
        gpu.release_memory()
