"""An executor that gives some sequences a mask of tokens after a step was launched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paged_backend.core.scheduler_output import (
    DraftGuide,
    LaunchedStep,
    PendingOutput,
    SchedulerOutput,
    TokenMasks,
)
from paged_backend.executor.base import Executor


@dataclass
class MaskedStep(LaunchedStep):
    step: LaunchedStep
    masks: TokenMasks | None

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        assert masks is None
        return self.step.sample(self.masks)


class MaskingExecutor:
    """Lets sequences with an odd number choose from some tokens only."""

    def __init__(self, executor: Executor, allowed: list[int]) -> None:
        self._executor = executor
        self.info = executor.info
        bits = np.zeros(-(-self.info.vocab_size // 32) * 32, np.uint8)
        bits[allowed] = 1
        self._mask = np.packbits(bits, bitorder="little").tobytes()
        self._decodes: list[int] = []  # the sequences that the next step may continue

    adapters = None

    def check(self) -> None:
        self._executor.check()

    def launch(self, output: SchedulerOutput, guide: DraftGuide | None = None) -> MaskedStep:
        dropped = set(output.continued.dropped)
        seq_ids = [seq_id for i, seq_id in enumerate(self._decodes) if i not in dropped]
        decodes = [item.seq_id for item in output.slices[: output.num_decodes]]
        self._decodes = seq_ids + decodes
        seq_ids = seq_ids + [seq_id for item in output.slices for seq_id in item.sample_seq_ids]
        masked = [index for index, seq_id in enumerate(seq_ids) if seq_id % 2]
        masks = TokenMasks(masked, self._mask * len(masked)) if masked else None
        return MaskedStep(self._executor.launch(output), masks)
