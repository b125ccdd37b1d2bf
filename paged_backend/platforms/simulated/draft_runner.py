"""A draft model on a simulated device: its passes take time, and some of its drafts are right."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.core.scheduler_output import TokenMasks
from paged_backend.platforms.base import ModelRunner
from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, captured_shapes
from paged_backend.platforms.gpu.step_inputs import DeviceInputs
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.portable.threads import one_torch_thread
from paged_backend.platforms.simulated.model_runner import SimulatedDevice, SimulatedModelRunner
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.scheduling import StepLimits


@dataclass(frozen=True, slots=True)
class SimulatedPass:
    """The tokens of a pass; see PendingTokens."""

    device: SimulatedDevice
    end_s: float
    token_ids: list[int]
    seconds: float

    def wait(self) -> list[int]:
        """Sleep until the pass is over."""
        self.device.wait(self.end_s)
        return self.token_ids


class SimulatedDraftRunner:
    """Prepares each pass as for a GPU, and launches it on the device of the model.

    Args:
        main: the runner of the model.
        layout: the groups of the block tables.
        limits: the limits of a step.
        max_model_len: the longest sequence.
        answers: the tokens that the model samples, by the seed of a request.
        pass_s: duration of a pass, in seconds.
        chance: the chance that a draft is right.
    """

    def __init__(
        self,
        main: SimulatedModelRunner,
        layout: KVCacheLayout,
        limits: StepLimits,
        max_model_len: int,
        answers: Mapping[int, list[int]],
        pass_s: float,
        chance: float,
    ) -> None:
        self._main, self._device, self._answers = main, main.device, answers
        self._pass_s, self._chance = pass_s, chance
        transfer = Transfer(torch.device("cpu"), gpu=None)
        self._inputs = DeviceInputs(
            layout.block_size, layout.num_groups, limits, max_model_len, transfer
        )
        self._graphs = StepGraphs(captured_shapes(limits), lambda _: lambda: torch.empty(0))
        self._random = random.Random(0)
        self._newest: list[int] = []  # tokens of the newest pass

    @property
    def model_seconds(self) -> float | None:
        """None: nothing is computed."""
        return None

    @property
    def num_graphs(self) -> int:
        """The number of CUDA graphs that a GPU would capture."""
        return len(self._graphs)

    def draw(
        self, scheduled_batch: ScheduledBatch, masks: TokenMasks | None = None
    ) -> SimulatedPass:
        """Prepare a pass, and launch it."""
        with one_torch_thread():  # copies to a device take no other threads
            inputs = self._inputs.update(scheduled_batch)
            self._inputs.send(inputs, self._graphs.fit(inputs.shape) or inputs.shape)
        end_s = self._device.launch(self._pass_s)
        self._newest = []
        for item in scheduled_batch.scheduled:
            if item.max_move:
                item = item.moved_back(self._main.num_wrong(item.seq_id))
            for spec in item.samples:
                token_id = self._answers[spec.params.seed or 0][spec.num_output_tokens]
                is_right = self._random.random() < self._chance
                self._newest.append(token_id if is_right else token_id + 1)
        return SimulatedPass(self._device, end_s, self._newest, self._pass_s)

    def follow(self, main: ModelRunner, scheduled_batch: ScheduledBatch) -> None:
        """Do nothing: each pass reads how far it moves back."""

    def give_drafts(self, main: ModelRunner, seq_ids: Sequence[int], place: int) -> None:
        """Let the next step of the model have the tokens of the newest pass as drafts."""
        assert isinstance(main, SimulatedModelRunner)
        main.take_drafts(seq_ids, self._newest)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Ignore copies of blocks, as the simulated device stores nothing."""

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences."""
        self._inputs.rows.release(seq_ids)
