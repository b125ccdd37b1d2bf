"""Decodes on a simulated device: its idle time, and the host's time for a step.

The engine and the preparation of a GPU's inputs are the real ones; there is no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_backend.checkpoint.hub import resolve_model
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.core.scheduler_output import DraftGuide, LaunchedStep, SchedulerOutput
from paged_backend.core.worker_state import WorkerState
from paged_backend.engine.engine import Engine
from paged_backend.executor.base import WorkerInfo
from paged_backend.executor.messages import encode
from paged_backend.platforms.base import ModelRunner
from paged_backend.platforms.drafting_runner import DraftingRunner
from paged_backend.platforms.simulated.draft_runner import SimulatedDraftRunner
from paged_backend.platforms.simulated.model_runner import SimulatedModelRunner
from paged_backend.tools.bench.requests import drain, greedy
from paged_backend.values import engine_args
from paged_backend.values.config import EngineConfig
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.scheduling import GPU_LIMITS
from paged_backend.values.sampling_defaults import NO_DEFAULTS

ARRIVING_TOKENS = 512
"""Tokens of the prompts that arrive while others decode."""

_LATEST_START = 64
"""Steps after which the last prompt of a batch is computed."""


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """A draft model that is not computed.

    Attributes:
        pass_s: duration of a pass, in seconds.
        chance: the chance that a draft is right.
    """

    pass_s: float
    chance: float


class SimulatedExecutor:
    """An engine's executor on a simulated device; see Executor.

    Args:
        config: the options.
        vocab_size: vocabulary size of the model that is left out.
        max_model_len: the longest sequence.
        answers: the answers that the device gives, see `SimulatedModelRunner`.
        drafts: the draft model; None without one. With it, there have to be answers.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        max_model_len: int,
        answers: Mapping[int, list[int]] | None = None,
        drafts: SimulatedDrafts | None = None,
    ) -> None:
        limits = config.step_limits(GPU_LIMITS)
        layout = KVCacheLayout(config.block_size, limits.max_num_batched_tokens)
        runner = SimulatedModelRunner(layout, limits, max_model_len, vocab_size, answers)
        self.device = runner.device
        self._state = WorkerState()
        self._runner: ModelRunner = runner
        if drafts is not None and answers is not None:
            drafting = SimulatedDraftRunner(
                runner, layout, limits, max_model_len, answers, drafts.pass_s, drafts.chance
            )
            self._runner = DraftingRunner(runner, drafting, layout)
        self.info = WorkerInfo(
            step_limits=limits,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=(),
            num_blocks=3 * limits.max_num_seqs * layout.max_blocks(0, max_model_len),
            kv_layout=layout,
            device="simulated",
            dtype="none",
            float32_matmul_precision=config.float32_matmul_precision,
            quantization=None,
            weight_forms={},
            num_ranks=1,
            weight_bytes=0,
            kv_cache="none",
            kv_bytes_per_token=0,
            attention_backend="none",
            num_graphs=runner.num_graphs,
            pooling=None,
            hidden_size=0,
            scores_pairs=False,
            sampling_defaults=NO_DEFAULTS,
            kernels_s=0.0,
            weights_s=0.0,
            prepare_s=0.0,
        )

    def check(self) -> None:
        """Do nothing: there are no other processes."""

    @property
    def adapters(self) -> None:
        """None: the device has no adapters."""
        return None

    def launch(self, output: SchedulerOutput, guide: DraftGuide | None = None) -> LaunchedStep:
        """Prepare a step, and launch it."""
        return self._runner.launch(self._state.apply(output))


@dataclass(frozen=True, slots=True)
class SimulatedFigures:
    """Steps of a batch on the simulated device."""

    context: int  # tokens of each prompt at first
    batch_size: int
    request_rate: float  # arrivals per second
    tokens_per_s: float
    host_ms: float  # processor time of a step, with the encoding of its outputs
    idle_share: float  # part of the device's time

    HEADER = "context  batch  arrivals/s  tokens/s  host ms  device idle"

    def line(self) -> str:
        """The row of the table under ``HEADER``."""
        return (
            f"{self.context:7}  {self.batch_size:5}  {self.request_rate:10.3g}  "
            f"{self.tokens_per_s:8.0f}  {self.host_ms:7.3f}  {self.idle_share:11.1%}"
        )


class SimulatedBench:
    """Measures batches of one length of prompt.

    Args:
        config: the options.
        vocab_size: vocabulary size of the model that is left out.
        step_s: the device's time for a step.
        context: tokens of each prompt at first.
        num_steps: timed steps.
    """

    def __init__(
        self, config: EngineConfig, vocab_size: int, step_s: float, context: int, num_steps: int
    ) -> None:
        self._step_s, self._context, self._num_steps = step_s, context, num_steps
        self._vocab_size = vocab_size
        self._longest = max(context, ARRIVING_TOKENS) + 2 * num_steps + _LATEST_START
        self._executor = SimulatedExecutor(config, vocab_size, self._longest)
        self._engine = Engine(config, self._executor)
        self._rng = np.random.default_rng(config.seed)
        self._num_requests = 0

    def measure(self, batch_size: int, request_rate: float) -> SimulatedFigures:
        """Time steps of a batch that decodes; as many sequences end as arrive."""
        device = self._executor.device
        device.reset(0.0)
        # With arrivals, one sequence ends whenever one arrives.
        steps_between = 1 / (request_rate * self._step_s) if request_rate else self._longest
        for place in range(batch_size):
            self._add(self._context, _LATEST_START + int((place + 1) * steps_between))
        while any(
            seq.num_tokens == self._context for seq in self._engine.scheduler.view().sequences
        ):
            self._engine.step()
        device.reset(self._step_s)
        arrivals = self._arrivals(request_rate)
        due_s = next(arrivals)
        num_tokens, cpu_s, start_s = 0, time.process_time(), time.monotonic()
        for _ in range(self._num_steps):
            while time.monotonic() - start_s >= due_s:
                self._add(ARRIVING_TOKENS, self._num_steps)
                due_s = next(arrivals)
            outputs = self._engine.step()
            encode(outputs)
            num_tokens += sum(len(output.new_token_ids) for output in outputs)
        cpu_s, seconds = time.process_time() - cpu_s, time.monotonic() - start_s
        figures = SimulatedFigures(
            self._context,
            batch_size,
            request_rate,
            tokens_per_s=num_tokens / seconds,
            host_ms=cpu_s / self._num_steps * 1e3,
            idle_share=device.idle_share,
        )
        device.reset(0.0)
        drain(self._engine)
        return figures

    def _arrivals(self, request_rate: float) -> Iterator[float]:
        """Yield the moments of a Poisson process, in seconds from its start."""
        moment = 0.0
        while True:
            moment += self._rng.exponential(1 / request_rate) if request_rate else float("inf")
            yield moment

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        self._num_requests += 1
        tokens = self._rng.integers(self._vocab_size, size=num_tokens).tolist()
        max_tokens = min(max_tokens, self._longest - num_tokens)
        self._engine.add_request(greedy(str(self._num_requests), tokens, max_tokens))


def run_simulated_bench(
    options: Mapping[str, Any],
    *,
    step_s: float,
    contexts: Iterable[int],
    batch_sizes: Iterable[int],
    num_steps: int,
    request_rate: float,
) -> Iterator[SimulatedFigures]:
    """Measure each batch size at each context; yields the figures as they come.

    Args:
        options: the engine's options. Of the model only config.json is read.
        step_s: the device's time for a step.
        contexts: tokens of each prompt.
        batch_sizes: sequences that decode at once.
        num_steps: timed steps.
        request_rate: prompts of `ARRIVING_TOKENS` that arrive per second.
    """
    config = engine_args.from_mapping(options).config
    vocab_size = load_model_config(resolve_model(config.model, weights=False)).vocab_size
    for context in contexts:
        bench = SimulatedBench(config, vocab_size, step_s, context, num_steps)
        for batch_size in batch_sizes:
            yield bench.measure(batch_size, request_rate)
