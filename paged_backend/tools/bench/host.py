"""Measures the host's share of a decode step: scheduling, messages and input arrays, no model."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import NamedTuple

from paged_backend.core.fairness.fair_queue import FairQueue
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler import Scheduler
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paged_backend.core.worker_state import WorkerState
from paged_backend.executor.messages import encode
from paged_backend.platforms.input_batch import InputBatchBuilder
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

BLOCK_SIZE = 16
_WARM_UP_STEPS = 5
HEADER = "batch  context  schedule  prepare  update  messages  total (ms per step)"


class HostTime(NamedTuple):
    """The medians of one batch, in milliseconds of processor time per step."""

    batch_size: int
    context: int
    schedule_ms: float  # Scheduler.schedule
    prepare_ms: float  # WorkerState.apply and InputBatchBuilder.build
    update_ms: float  # Scheduler.update_from_output
    messages_ms: float  # the outputs, encoded for one front end

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return self.schedule_ms + self.prepare_ms + self.update_ms + self.messages_ms

    def line(self) -> str:
        """Return the row under `HEADER`."""
        return (
            f"{self.batch_size:5}  {self.context:7}  {self.schedule_ms:8.3f}  "
            f"{self.prepare_ms:7.3f}  {self.update_ms:6.3f}  {self.messages_ms:8.3f}  "
            f"{self.total_ms:5.3f}"
        )


def measure_host(batch_size: int, context: int, num_steps: int) -> HostTime:
    """Time decode steps of ``batch_size`` sequences after prompts of ``context`` tokens."""
    step = _HostStep(batch_size, context, num_steps)
    step.compute_prompts()
    timed = [step.decode() for _ in range(num_steps)][_WARM_UP_STEPS:]
    medians = (statistics.median(column) * 1e3 for column in zip(*timed, strict=True))
    return HostTime(batch_size, context, *medians)


def new_scheduler(limits: SchedulerConfig, num_blocks: int) -> Scheduler:
    """Return a scheduler without an engine, over blocks of `BLOCK_SIZE` tokens."""
    layout = KVCacheLayout(BLOCK_SIZE, limits.max_num_batched_tokens)
    kv = KVCacheManager(num_blocks, layout, enable_prefix_caching=True)
    return Scheduler(limits, kv, FairQueue({}, fair=True))


def num_samples(output: SchedulerOutput) -> int:
    """Return the number of tokens that a step samples."""
    num_sliced = sum(len(item.sample_seq_ids) for item in output.slices)
    return len(output.continued.new_token_ids) + num_sliced


def any_tokens(output: SchedulerOutput) -> ModelRunnerOutput:
    """Return the result of a step that samples the same token everywhere."""
    return ModelRunnerOutput([[7]] * num_samples(output))


class _HostStep:
    def __init__(self, batch_size: int, context: int, num_steps: int) -> None:
        max_model_len = context + num_steps + 2
        num_blocks = batch_size * (-(-max_model_len // BLOCK_SIZE)) * 102 // 100 + 2
        limits = SchedulerConfig(batch_size, batch_size * context, max_model_len, True, frozenset())
        self._scheduler = new_scheduler(limits, num_blocks)
        self._worker = WorkerState()
        self._inputs = InputBatchBuilder(BLOCK_SIZE)
        params = SamplingParams(temperature=0, max_tokens=num_steps + 1, ignore_eos=True)
        for number in range(batch_size):
            prompt = [number, *range(context - 1)]
            self._scheduler.add_request(Request(str(number), prompt, params), seed=0)

    def compute_prompts(self) -> None:
        """Run the first step."""
        output = self._scheduler.schedule()
        self._inputs.build(self._worker.apply(output))
        self._scheduler.update_from_output(any_tokens(output))

    def decode(self) -> list[float]:
        """Run one step; returns the seconds of its parts."""
        times = [time.process_time()]
        output = self._scheduler.schedule()
        times.append(time.process_time())
        self._inputs.build(self._worker.apply(output))
        times.append(time.process_time())
        outputs = self._scheduler.update_from_output(any_tokens(output))
        times.append(time.process_time())
        encode(outputs)
        times.append(time.process_time())
        return [after - before for before, after in pairwise(times)]
