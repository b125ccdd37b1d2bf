"""The size and shape of the KV cache: fixed blocks of tokens, the same number in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one token's keys and values take up, and how many tokens make a block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers together, keys and values."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return values * self.dtype.itemsize

    def num_blocks(self, budget_bytes: int) -> int:
        """How many whole blocks fit into `budget_bytes`."""
        return budget_bytes // self.bytes_per_block
