"""The engine's side of `bench decode`: steps in which a whole batch decodes, and first tokens."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.platforms.select import gpu_of, is_gpu
from paged_backend.tools.bench.decode_peer import (
    FIRST_TOKEN_LENGTHS,
    REPEATS,
    FirstToken,
    median_first_token_ms,
)
from paged_backend.tools.bench.decode_report import (
    TRACED_STEPS,
    BatchResult,
    DecodeFigures,
    IdleShare,
)
from paged_backend.tools.bench.decode_roofline import DecodeRoofline
from paged_backend.tools.bench.device_trace import device_gaps, traced
from paged_backend.tools.bench.environment import copy_bandwidth, matmul_rate
from paged_backend.tools.bench.peer_process import PeerSettings
from paged_backend.tools.bench.prefix import PrefixFigures, time_prefix
from paged_backend.tools.bench.requests import drain, first_token_ms, greedy
from paged_backend.values.config import EngineConfig

WARM_UP_STEPS = 8
PREFIX_TOKENS = 2048
PEER_BLOCK = 128  # tokens, at most


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
        free_memory(self.device)

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


def free_memory(device: torch.device) -> None:
    """Return the memory of deleted objects to the device."""
    gc.collect()
    gpu = gpu_of(device)
    if gpu is not None:
        gpu.release_memory()
