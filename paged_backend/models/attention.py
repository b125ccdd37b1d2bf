"""The interface between a model and the paged KV cache.

A model passes one layer's queries, keys and values to an `AttentionBackend`, which owns the pool's
tensors. Block 0 is the null block: it pads block tables, and no sequence ever reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.models.layers import QKNorm

_METADATA_DTYPES = {
    "positions": torch.int32,
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "block_table": torch.int32,
    "slot_mapping": torch.int64,
}


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch of prefill chunks and decodes, as attention needs it.

    The tokens of sequence `s` are rows `query_start_loc[s]` to `query_start_loc[s + 1]` of the
    batch and the last positions of its `seq_lens[s]` tokens. All are contiguous.

    Raises:
        TypeError: a tensor has another dtype, or gaps; kernels read them by their addresses.
    """

    query_start_loc: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32, tokens in the cache once this step's are written
    block_table: Tensor  # [num_seqs, max_blocks] int32, padded with block 0
    slot_mapping: Tensor  # [num_tokens] int64, block * block_size + offset; -1 writes nothing
    positions: Tensor  # [num_tokens] int32, of each token in its sequence
    num_decodes: int  # number of leading sequences that have exactly one token here

    def __post_init__(self) -> None:
        for name, dtype in _METADATA_DTYPES.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise TypeError(f"{name} must be contiguous and {dtype}, got {tensor.dtype}")


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of a model.

    Attributes:
        index: the layer's number in the KV cache.
        num_heads: query heads.
        num_kv_heads: heads of the keys and values; a divisor of `num_heads`.
        head_dim: size of a head.
        scale: factor on the scores before the softmax.
        cos_sin_cache: [max_positions, head_dim] float32: for each position the cosines of
            head_dim / 2 angles, then their sines.
        window: the number of positions that a token sees, its own included; None for all.
        qk_norm: the norm of each head of the queries and keys; None for no norm.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    cos_sin_cache: Tensor
    window: int | None = None
    qk_norm: QKNorm | None = None


class AttentionBackend(ABC):
    """Owns the KV pool of all layers and computes attention over it."""

    @abstractmethod
    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        """Norm the heads if asked to, rotate queries and keys, write keys and values, attend.

        `qkv`, which may be overwritten, is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        in the pool's dtype, heads of the queries first, then of the keys, then of the values.
        Returns [num_tokens, num_heads * head_dim].
        """

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each pair's first block over its second, in all layers."""
