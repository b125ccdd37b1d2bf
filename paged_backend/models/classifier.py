"""The head of a reranker: a score from the hidden states of the last token of a pair of texts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paged_backend.checkpoint.classifier import ClassifierSpec, ScoreFunction
from paged_backend.checkpoint.stored_tensor import FLOATS, Parameter, StoredTensor, StoredType
from paged_backend.models.embedding import EmbeddingMethod


class Head(Protocol):
    """Makes a score of pooled hidden states."""

    def __call__(self, pooled: Tensor) -> Tensor:
        """Return scores [rows, 1] float32 for `pooled` [rows, hidden_size] float32."""
        ...


def activate(logits: Tensor, activation: ScoreFunction) -> Tensor:
    """Return the scores for the outputs of a head."""
    return logits.sigmoid() if activation is ScoreFunction.SIGMOID else logits


class Classifier:
    """One row of weights, and an activation.

    The row is the checkpoint's ``score.weight``. With `ClassifierSpec.token_ids`, it is the
    difference of two rows of the output layer, so that the sigmoid is the probability of the second
    token, compared with the first one.

    Args:
        hidden_size: numbers of a hidden state.
        vocab_size: rows of the output layer.
        spec: where the weights come from.
        tied: the output layer is the embedding.
        device: where the hidden states are.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        spec: ClassifierSpec,
        *,
        tied: bool,
        device: torch.device,
    ) -> None:
        self._activation = spec.activation
        self._token_ids = spec.token_ids
        self._device = device
        self._weight = torch.empty(0)
        shape = (1, hidden_size) if spec.token_ids is None else (vocab_size, hidden_size)
        # If tied, `pack` gets the embedding.
        is_read = spec.token_ids is None or not tied
        self._stored = StoredTensor(StoredType(shape, FLOATS)) if is_read else None

    def parameters(self) -> dict[str, Parameter]:
        """Return the tensor to fill, by checkpoint name."""
        if self._stored is None:
            return {}
        name = "score.weight" if self._token_ids is None else "lm_head.weight"
        return {name: self._stored}

    def pack(self, embedding: EmbeddingMethod) -> None:
        """Keep the row of weights in float64, and nothing else.

        Args:
            embedding: the model's embedding.
        """
        if self._token_ids is not None:
            first, second = self._rows(self._token_ids, embedding).double()
            row = (second - first)[None]
        else:
            assert self._stored is not None
            row = self._stored.value.double()
        self._weight = row.to(self._device)
        self._stored = None

    def _rows(self, token_ids: tuple[int, int], embedding: EmbeddingMethod) -> Tensor:
        """Return the rows of the output layer of both tokens."""
        if self._stored is not None:
            return self._stored.value[list(token_ids)]
        return embedding.rows(torch.tensor(token_ids, device=self._device))

    def __call__(self, pooled: Tensor) -> Tensor:
        """Return scores [rows, 1] float32 for `pooled` [rows, hidden_size] float32."""
        # A sum for each row alone, so that it does not depend on the other rows.
        scores = (pooled.double() * self._weight).sum(1, keepdim=True)
        return activate(scores, self._activation).float()
