"""The seam between a model and the paged KV cache.

A model hands one layer's queries, keys and values to an `AttentionBackend`, which owns the pool's
tensors. Block 0 is the null block: it pads block tables and no sequence ever reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.models.devices import kernels_run_on
from paged_backend.models.layers import HeadNorm
from paged_backend.runner.kv_cache import KVCacheSpec

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
    num_decodes: int  # so many sequences, the first ones, have exactly one token here

    def __post_init__(self) -> None:
        for name, dtype in _METADATA_DTYPES.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise TypeError(f"{name} must be contiguous and {dtype}, got {tensor.dtype}")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """What all attention layers of a model have in common."""

    num_heads: int
    scale: float  # factor on the scores before the softmax


class AttentionBackend(ABC):
    """Owns the KV pool of all layers and computes attention over it."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Tensor,
        meta: AttentionMetadata,
        window: int | None = None,
        head_norm: HeadNorm | None = None,
    ) -> Tensor:
        """Norm the heads if asked to, rotate queries and keys, write keys and values, attend.

        `qkv`, which may be overwritten, is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        in the pool's dtype, heads of the queries first, then of the keys, then of the values.
        `rotary` is [max_positions, head_dim] float32: for each position the cosines of head_dim / 2
        angles, then their sines. With a `window` a token sees that many positions, its own
        included. Returns [num_tokens, num_heads * head_dim].
        """

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each pair's first block over its second, in all layers."""


def make_attention_backend(
    spec: KVCacheSpec, config: AttentionConfig, num_blocks: int, device: torch.device
) -> AttentionBackend:
    """Allocate a pool of `num_blocks` blocks on `device` under the fastest backend for it."""
    if kernels_run_on(device):
        # Imported here because Triton exists only where there is a GPU or its interpreter.
        from paged_backend.runner.triton_attention import TritonAttention

        return TritonAttention(spec, config, num_blocks, device)
    if device.type == "cpu" and spec.dtype == torch.float32:
        # Imported here because numba exists only where the CPU serves.
        from paged_backend.runner.cpu_attention import CpuAttention

        return CpuAttention(spec, config, num_blocks)
    from paged_backend.runner.torch_attention import TorchAttention

    return TorchAttention(spec, config, num_blocks, device)
