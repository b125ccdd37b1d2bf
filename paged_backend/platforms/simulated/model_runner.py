"""A model runner without a model, to measure a host's work for a GPU without having one.

A step's inputs are prepared as for a GPU. The forward pass is only a time: a step occupies the
device for a given number of seconds, and a thread that waits for its tokens sleeps until then. The
host's time to launch kernels is not included.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.core.scheduler_output import LaunchedStep, ModelRunnerOutput, TokenMasks
from paged_backend.platforms.drafts import keep_accepted
from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, captured_shapes
from paged_backend.platforms.gpu.step_inputs import DeviceInputs, StepInputs
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.portable.threads import one_torch_thread
from paged_backend.platforms.simulated.texts import SimulatedTexts
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.scheduling import StepLimits

_STRIDE = 7919  # between the tokens of two rows


class SimulatedDevice:
    """Carries out steps one after the other, each in ``step_s`` seconds.

    Attributes:
        step_s: duration of a step.
        idle_s: seconds without a step, between the first step and the last.
        host_s: the part of these in which the thread that launches steps was running. Other
            processes, which keep it from running, do not change it.
        busy_s: seconds of all steps.
    """

    def __init__(self) -> None:
        self.step_s = self.idle_s = self.host_s = self.busy_s = 0.0
        self._free_s: float | None = None  # the end of the last step, on the monotonic clock
        self._processor_s = 0.0  # the thread's, when it launched a step or got tokens last

    def launch(self, step_s: float | None = None) -> float:
        """Start a step after those before it; returns the moment of its end.

        Args:
            step_s: how long it takes; by default as long as all steps.
        """
        step_s = self.step_s if step_s is None else step_s
        now = time.monotonic()
        if self._free_s is not None:
            idle_s = max(0.0, now - self._free_s)
            self.idle_s += idle_s
            self.host_s += min(idle_s, time.thread_time() - self._processor_s)
            now = max(now, self._free_s)
        self.busy_s += step_s
        self._free_s = now + step_s
        self._processor_s = time.thread_time()
        return self._free_s

    def wait(self, end_s: float) -> None:
        """Sleep until a moment of the monotonic clock."""
        time.sleep(max(0.0, end_s - time.monotonic()))
        self._processor_s = time.thread_time()

    @property
    def idle_share(self) -> float:
        """The fraction of the time in which the device was idle."""
        return self.idle_s / (self.idle_s + self.busy_s)

    @property
    def host_share(self) -> float:
        """The same on a machine without other processes."""
        return self.host_s / (self.host_s + self.busy_s)

    def reset(self, step_s: float) -> None:
        """Forget the steps so far; the next ones take ``step_s`` seconds."""
        self.__init__()  # type: ignore[misc]
        self.step_s = step_s


@dataclass(frozen=True, slots=True)
class SimulatedStep(LaunchedStep):
    """A step on the simulated device: a LaunchedStep, and then its PendingOutput."""

    device: SimulatedDevice
    end_s: float
    token_ids: list[list[int]]  # tokens of each sequence that samples
    num_predicted: dict[int, int]  # see ModelRunnerOutput
    drafts: dict[int, list[int]]  # those that were drawn from texts, by seq_id

    def drafts_from_texts(self) -> dict[int, list[int]]:
        """Return the drafts; they take no time."""
        return self.drafts

    def sample(self, masks: TokenMasks | None = None) -> SimulatedStep:
        """Return the tokens to wait for; sampling takes no time."""
        return self if masks is None else replace(self, end_s=max(self.end_s, time.monotonic()))

    def result(self) -> ModelRunnerOutput:
        """Sleep until the step is over."""
        self.device.wait(self.end_s)
        return ModelRunnerOutput(self.token_ids, num_predicted=self.num_predicted)


class SimulatedModelRunner:
    """Prepares each step as for a GPU, and launches it on a simulated device.

    Args:
        layout: the groups of the block tables.
        limits: the limits of a step.
        max_model_len: the longest sequence.
        vocab_size: number of token ids.
        answers: token ids to sample by the seed of a request. Other requests get tokens that repeat
            no earlier ones, so that there is nothing to guess.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        limits: StepLimits,
        max_model_len: int,
        vocab_size: int,
        answers: Mapping[int, list[int]] | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._answers = answers
        self.device = SimulatedDevice()
        self._given: dict[int, list[int]] = {}  # drafts for the next step, by seq_id
        self._texts = SimulatedTexts(*(limits.match_lengths or (1, 1)))
        transfer = Transfer(torch.device("cpu"), gpu=None)
        self._inputs = DeviceInputs(
            layout.block_size, layout.num_groups, limits, max_model_len, transfer
        )
        self._graphs = StepGraphs(captured_shapes(limits), lambda _: lambda: torch.empty(0))

    @property
    def model_seconds(self) -> float | None:
        """None: nothing is computed."""
        return None

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        return "none"

    @property
    def num_graphs(self) -> int:
        """The number of CUDA graphs that a GPU would capture."""
        return len(self._graphs)

    def take_drafts(self, seq_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take one more draft of some sequences for the next step."""
        for seq_id, token_id in zip(seq_ids, token_ids, strict=True):
            self._given.setdefault(seq_id, []).append(token_id)

    def num_wrong(self, seq_id: int) -> int:
        """Return the number of wrong drafts in the last step of a sequence."""
        return self._texts.num_wrong(seq_id)

    def launch(self, scheduled_batch: ScheduledBatch) -> SimulatedStep:
        """Prepare a step, and launch it."""
        self._inputs.rows.release(scheduled_batch.freed_seq_ids)
        self._texts.release(scheduled_batch.freed_seq_ids)
        with one_torch_thread():  # copies to a device take no other threads
            inputs = self._inputs.update(scheduled_batch)
            self._inputs.send(inputs, self._graphs.fit(inputs.shape) or inputs.shape)
        end_s = self.device.launch()
        scheduled_batch = scheduled_batch.with_drafts(self._given)
        self._given = {}
        token_ids = self._kept_token_ids(inputs, scheduled_batch)
        texts = self._texts
        return SimulatedStep(self.device, end_s, token_ids, texts.num_predicted, texts.drafts)

    def _kept_token_ids(
        self, inputs: StepInputs, scheduled_batch: ScheduledBatch
    ) -> list[list[int]]:
        """Return the tokens that the device samples, without those after wrong drafts."""
        if self._answers is None:
            return keep_accepted(scheduled_batch, self._new_token_ids(inputs), {})[0]
        completed = self._texts.complete(scheduled_batch)
        token_ids = [
            self._answers[spec.params.seed or 0][spec.num_output_tokens]
            for item in completed.all_sequences()
            for spec in item.samples
        ]
        kept, _ = keep_accepted(completed, token_ids, {})
        self._texts.keep(completed, kept)
        return kept

    def _new_token_ids(self, inputs: StepInputs) -> list[int]:
        positions = inputs.batch.sample_positions.astype(np.int64)
        token_ids = (inputs.sample_rows * _STRIDE + positions * positions) % self._vocab_size
        found: list[int] = token_ids.tolist()
        return found
