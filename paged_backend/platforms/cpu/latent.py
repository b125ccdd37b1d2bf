"""Paged latent attention on the CPU: the pool, and calls of the kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionMetadata, LatentLayer
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.cpu import latent_tiles
from paged_backend.platforms.cpu.memory import zeros
from paged_backend.platforms.cpu.threads import ParallelKernel, float_bits

_FUNCTIONS = {
    torch.float32: (latent_tiles.write_float32, latent_tiles.attend_float32),
    torch.bfloat16: (latent_tiles.write_bfloat16, latent_tiles.attend_bfloat16),
}


class CpuLatentAttention(AttentionBackend):
    """Owns a pool [group_size, blocks, row_size, block_size] of float32 or bf16 numbers."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int) -> None:
        self._places = spec.places
        row_size = next(iter(spec.sizes.values())).key_dim
        self._write, self._attend = _kernels(spec.dtype)
        shape = spec.group_size, num_blocks, row_size, spec.block_size
        self._pool = zeros(shape, spec.dtype)

    def attend_latent(
        self, layer: LatentLayer, q: Tensor, rows: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        group, part = self._places[layer.index]
        pool, table = self._pool[part], meta.block_tables[group]
        q, rows = q.contiguous(), rows.contiguous()
        out = torch.empty(*q.shape[:2], layer.rank)
        tensors = (
            q,
            rows,
            layer.cos_sin_cache,
            meta.query_start_loc,
            meta.seq_lens,
            table,
            meta.slot_mappings[group],
            pool,
            out,
        )
        sizes = len(q), len(layer.cos_sin_cache), *table.shape, len(pool)
        layer_sizes = layer.num_heads, layer.rank, layer.rotary_dim, pool.shape[2]
        arguments = (
            *(tensor.data_ptr() for tensor in tensors),
            *sizes,
            *layer_sizes,
            float_bits(layer.scale * math.log2(math.e)),
        )
        self._write(*arguments)
        self._attend(*arguments)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._pool[:, target] = self._pool[:, source]


@functools.cache
def _kernels(dtype: torch.dtype) -> tuple[ParallelKernel, ParallelKernel]:
    """Return the kernels for a dtype of the pool: one writes rows, the other attends."""
    write, attend = _FUNCTIONS[dtype]
    return ParallelKernel(write), ParallelKernel(attend)
