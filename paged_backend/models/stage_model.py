"""A model of which this process computes a stage, among other stages that other ranks compute.

Hidden states arrive from the stage before, and go to the next one. The last stage computes what the
model returns and sends it to all stages, so that all ranks sample the same tokens. Model runners
and the layers of models do not know of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.base import LoadableModel
from paged_backend.models.division import Group
from paged_backend.models.states import StateLayer


@runtime_checkable
class Divisible(LoadableModel, Protocol):
    """A model that can be built with the layers of a stage only (`ModelShape.stage`).

    The caller of its methods is in torch's inference mode.
    """

    def embed(self, input_ids: Tensor) -> Tensor:
        """Compute what the first layer reads, [num_tokens, hidden_size]."""
        ...

    def run_layers(
        self,
        hidden: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run the layers of this stage.

        Args:
            hidden: [num_tokens, hidden_size] hidden states before the stage; they change.
            attention: see `Model.forward`.
            meta: see `Model.forward`.
            logits_indices: rows to return of the last stage; None for all rows.

        Returns:
            The hidden states after the stage; those of the last stage after the final norm.
        """
        ...


class StageModel:
    """See :class:`~paged_backend.models.base.Model`.

    All ranks get the same logits, or the same hidden states of a model without an output layer.

    Args:
        part: the stage of this rank.
        config: the whole model.
        pipeline: the ranks of all stages, in order.
        dtype: dtype of hidden states and logits.
        device: where they are.
    """

    head = None

    def __init__(
        self,
        part: Divisible,
        config: ModelConfig,
        pipeline: Group,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.max_model_len = part.max_model_len
        self._part = part
        self._pipeline = pipeline
        self._last = pipeline.size - 1
        self._dtype = dtype
        self._device = device

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers of this stage, in order."""
        return self._part.attention_layers

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The layers of this stage that keep a state for each sequence, in order."""
        return self._part.state_layers

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run the layers of this stage when those before have run, see `Model.forward`.

        If the model has an output layer, only the last stage has the result, which is all that its
        `compute_logits` reads. Other stages return memory of the same shape.
        """
        pipeline, hidden_size = self._pipeline, self.config.hidden_size
        if pipeline.rank == 0:
            hidden = self._part.embed(input_ids)
        else:
            hidden = self._empty(len(input_ids), hidden_size)
            pipeline.receive(hidden, pipeline.rank - 1)
        if pipeline.rank == self._last:
            hidden = self._part.run_layers(hidden, attention, meta, logits_indices).contiguous()
        else:
            pipeline.send(self._part.run_layers(hidden, attention, meta, None), pipeline.rank + 1)
            num_rows = len(input_ids if logits_indices is None else logits_indices)
            hidden = self._empty(num_rows, hidden_size)
        if not self.config.has_output_layer:
            pipeline.broadcast(hidden, self._last)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [num_rows, vocab_size] that the last stage computes from its rows."""
        if self._pipeline.rank == self._last:
            logits = self._part.compute_logits(hidden).contiguous()
        else:
            logits = self._empty(len(hidden), self.config.vocab_size)
        self._pipeline.broadcast(logits, self._last)
        return logits

    def _empty(self, num_rows: int, size: int) -> Tensor:
        return torch.empty(num_rows, size, dtype=self._dtype, device=self._device)
