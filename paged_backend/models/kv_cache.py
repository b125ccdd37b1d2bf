"""The size and shape of the KV cache: fixed blocks of tokens, the same number in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged_backend.models.attention import AttentionLayer


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The shape of a token's keys and values, and the number of tokens in a block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype
    ) -> KVCacheSpec:
        """Return the spec of a model's attention layers.

        Raises:
            ValueError: the layers differ in their KV heads; blocks have one size in all layers.
        """
        sizes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
        if len(sizes) != 1:
            raise ValueError(f"attention layers differ in (num_kv_heads, head_dim): {sizes}")
        ((num_kv_heads, head_dim),) = sizes
        return cls(len(layers), num_kv_heads, head_dim, block_size, dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers together, keys and values."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return values * self.dtype.itemsize

    def num_blocks(self, budget_bytes: int) -> int:
        """The number of whole blocks that fit into `budget_bytes`."""
        return budget_bytes // self.bytes_per_block
