"""The interface of a model: what a worker and its model runner need from a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.classifier import Head
from paged_backend.models.states import StateLayer


class OutputConfig(Protocol):
    """The facts that a model runner needs about a model's output."""

    @property
    def has_output_layer(self) -> bool:
        """Return True if the model computes logits."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        ...


class Model(Protocol):
    """A decoder on one device that is ready to compute, for inference only."""

    @property
    def config(self) -> OutputConfig:
        """The model's sizes."""
        ...

    @property
    def max_model_len(self) -> int:
        """The largest number of tokens of prompt and output."""
        ...

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers, in order."""
        ...

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The layers that keep a state for each sequence, in order."""
        ...

    @property
    def head(self) -> Head | None:
        """The head of a reranker, which scores pooled hidden states; None for other models."""
        ...

    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run all layers; returns what `compute_logits` reads, [num_rows, any].

        For most models these are hidden states [num_rows, hidden_size] after the final norm.

        Args:
            input_ids: [num_tokens] the step's tokens, in the order of `meta`.
            attention: writes the step's keys and values to its KV pool, and computes attention.
            meta: the layout of the step.
            logits_indices: int64 rows of `input_ids` to return; None for all rows.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [num_rows, vocab_size] in the model's dtype from `forward`'s result.

        A model that is loaded without its output layer (`config.has_output_layer`) has none.
        """
        ...


class LoadableModel(Model, Protocol):
    """A model with weights that are filled from a checkpoint.

    The constructor allocates the weights without values. Fill every tensor in `parameters()`, then
    call `pack` once.
    """

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        ...

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        ...


class Encoder(Protocol):
    """A bidirectional model without a KV cache, for inference only."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    @property
    def head(self) -> Head | None:
        """The head of a reranker, which scores pooled hidden states; None for other models."""
        ...

    def forward(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute the last hidden states [num_tokens, hidden_size] of whole prompts.

        Args:
            input_ids: [num_tokens] int64, the prompts one after the other.
            lengths: the number of tokens of each prompt.
        """
        ...
