"""The interface of a model: what a worker and its model runner need from a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata


class Model(Protocol):
    """A decoder on one device, for inference only.

    The constructor allocates the weights without values. Fill every tensor in `parameters()`, then
    call `pack` once.
    """

    config: ModelConfig
    max_model_len: int
    attention_layers: Sequence[AttentionLayer]

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        ...

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        ...

    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run all layers; returns hidden states [num_rows, hidden_size] after the final norm.

        Args:
            input_ids: [num_tokens] the step's tokens, in the order of `meta`.
            attention: writes the step's keys and values to its KV pool, and computes attention.
            meta: the layout of the step.
            logits_indices: int64 rows of `input_ids` to return; None for all rows.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [num_rows, vocab_size] in the model's dtype from `forward`'s result."""
        ...
