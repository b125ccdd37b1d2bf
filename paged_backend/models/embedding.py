"""The embedding of tokens, where it is not the weight of the output layer."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class EmbeddingMethod(Protocol):
    """Stores a table with a row for each token, and looks rows up."""

    @property
    def table(self) -> Tensor:
        """The memory to fill, [rows of this rank, hidden_size]."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """Look up the rows [count, hidden_size] at `index` [count] int64."""
        ...


class Embedding:
    """A table without values; see `EmbeddingMethod`.

    Args:
        vocab_size: number of tokens.
        hidden_size: size of a row.
        dtype: dtype of the table.
        device: device of the table.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.table = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the rows [count, hidden_size] at `index` [count] int64."""
        return F.embedding(index, self.table)
