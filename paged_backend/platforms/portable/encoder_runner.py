"""The model runner of encoders, on any device: each step computes whole prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.core.scheduler_output import LaunchedStep, ModelRunnerOutput, TokenMasks
from paged_backend.models.base import Encoder
from paged_backend.platforms.input_batch import pool_indices
from paged_backend.platforms.pooling import Pooler, pooled_bytes
from paged_backend.platforms.portable.threads import one_torch_thread


@dataclass(frozen=True, slots=True)
class EncodedStep(LaunchedStep):
    """A launched step, and its pending output; see LaunchedStep and PendingOutput."""

    pooled: Tensor  # [num_prompts, hidden_size] float32, or [num_prompts, 1] scores

    def sample(self, masks: TokenMasks | None = None) -> EncodedStep:
        """Return the step; there is nothing to sample."""
        return self

    def result(self) -> ModelRunnerOutput:
        """Wait for the device, and return the embeddings or scores."""
        return ModelRunnerOutput([], pooled=pooled_bytes(self.pooled.cpu().numpy()))


class EncoderRunner:
    """Carries out the steps of an encoder."""

    num_graphs = 0

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._pooler = Pooler(self._send, encoder.head)
        self.model_seconds = 0.0  # in which the host computed or launched forward passes

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        return "PackedPrompts"

    @torch.inference_mode()
    def launch(self, scheduled_batch: ScheduledBatch) -> EncodedStep:
        """Start the forward pass of a step and the pooling of its prompts."""
        items = scheduled_batch.scheduled
        lengths = [len(item.token_ids) for item in items]
        input_ids = np.fromiter(chain.from_iterable(i.token_ids for i in items), np.int64)
        rows = pool_indices(items, np.cumsum([0, *lengths], dtype=np.int32))
        specs = [item.pool for item in items if item.pool is not None]
        with one_torch_thread():
            started = time.perf_counter()
            hidden = self._encoder.forward(self._send(input_ids), lengths)
            self.model_seconds += time.perf_counter() - started
            if len(rows) < len(hidden):
                hidden = hidden[self._send(rows)]
            return EncodedStep(self._pooler.pool(hidden, specs))

    def _send(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._encoder.device)
