"""Paged attention on the CPU: the pool, and calls of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec, KVScales
from paged_backend.models.kv_pool import PoolTensor
from paged_backend.platforms.cpu.amx_attention import amx_kernels
from paged_backend.platforms.cpu.bf16_linear import padded_rows, reads_bfloat16
from paged_backend.platforms.cpu.layers import norm_heads
from paged_backend.platforms.cpu.memory import zeros
from paged_backend.platforms.cpu.rows import contiguous
from paged_backend.platforms.cpu.softmax import LOWEST
from paged_backend.platforms.cpu.vector_attention import vector_kernels
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import KVSizes
from paged_backend.values.windows import Chunks, window_size

_LOG2E = math.log2(math.e)
_NO_WINDOW = 1 << 40
HEAD_DIM_STEP = 8
"""The kernels read the numbers of a head in groups of this size."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer's kernels read: its part of the pool, and constants of the layer."""

    layer: AttentionLayer
    group: int  # it uses this group's block table
    tensors: tuple[Tensor, ...]  # keys, values, scales, sinks; kept alive
    addresses: tuple[int, ...]  # addresses of the tensors
    constants: tuple[int, ...]  # the kernels' last arguments


class CpuAttention(AttentionBackend):
    """Owns pools of keys and of values, for each layer [blocks, kv_heads, head_dim * block_size].

    Keys are [head_dim, block_size] there, and values are [block_size, head_dim]; both are read
    along their last dimension. On AMX, pairs of numbers of the first dimension lie together.
    Scales, if each token and head has them, are float32 [blocks, 2, kv_heads, block_size] of each
    layer: scales of the keys, then of the values. See `PoolTensor` for the layers in a pool.

    Args:
        spec: the shape and format of the pool.
        num_blocks: its number of blocks.
        amx: compute on AMX units, which needs bf16 numbers and a shape that `fits`.

    Raises:
        ConfigError: the kernels cannot read heads of this size.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, *, amx: bool = False) -> None:
        self._spec = spec
        self._num_blocks = num_blocks
        self._write, self._attend = amx_kernels() if amx else vector_kernels(spec.dtype)
        for sizes in set(spec.sizes.values()):
            if sizes.key_dim % HEAD_DIM_STEP:
                raise ConfigError(
                    f"head_dim must be a multiple of {HEAD_DIM_STEP} for the kernels of a CPU, got "
                    f"{sizes.key_dim}"
                )
        self._places = spec.places
        make = partial(zeros, dtype=spec.dtype)
        self._keys, self._values = (
            PoolTensor(spec, num_blocks, self._numbers_of, make) for _ in range(2)
        )
        scale_blocks = num_blocks if spec.scales is KVScales.TOKEN_HEAD else 0
        self._scales = PoolTensor(spec, scale_blocks, self._shape_of_scales, torch.ones)
        self._layers: dict[int, _Layer] = {}

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        qkv = contiguous(qkv)
        if layer.qk_norm is not None:
            norm_heads(qkv, layer.qk_norm.heads, layer.qk_norm.eps)
        prepared = self._prepared(layer)
        table = meta.block_tables[prepared.group]
        size, rounds = layer.num_heads * layer.head_dim, prepared.constants[-1]
        out = padded_rows(len(qkv), size) if rounds else torch.empty(len(qkv), size)
        arguments = (
            qkv.data_ptr(),
            layer.cos_sin_cache.data_ptr(),
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
            table.data_ptr(),
            meta.slot_mappings[prepared.group].data_ptr(),
            *prepared.addresses,
            out.data_ptr(),
            qkv.shape[0],
            layer.cos_sin_cache.shape[0],
            *table.shape,
            *prepared.constants,
        )
        if layer.keeps_tokens:
            self._write(*arguments)
        self._attend(*arguments)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for pool in (self._keys, self._values, self._scales):
                if pool.memory.numel():
                    pool.copy_block(source, target)

    def _numbers_of(self, sizes: KVSizes) -> tuple[int, int]:
        return sizes.num_heads, sizes.key_dim * self._spec.block_size

    def _shape_of_scales(self, sizes: KVSizes) -> tuple[int, int, int]:
        return 2, sizes.num_heads, self._spec.block_size

    def _prepared(self, layer: AttentionLayer) -> _Layer:
        prepared = self._layers.get(layer.index)
        if prepared is None or prepared.layer is not layer:
            keys, scales = self._keys.of(layer.keeper), self._scales_of(layer)
            tensors = keys, self._values.of(layer.keeper), scales, _sinks_of(layer)
            constants = (
                self._num_blocks,
                keys.stride(0),
                scales.stride(0),
                int(self._spec.scales is KVScales.TOKEN_HEAD),
                layer.num_heads + 2 * layer.num_kv_heads * layer.keeps_tokens,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                self._spec.block_size,
                _bits(layer.scale * _LOG2E),
                _bits((layer.softcap or 0.0) * _LOG2E),
                _NO_WINDOW if layer.window is None else window_size(layer.window),
                int(isinstance(layer.window, Chunks)),
                int(reads_bfloat16(layer.reader)),
            )
            addresses = tuple(tensor.data_ptr() for tensor in tensors)
            group = self._places[layer.keeper].group
            prepared = _Layer(layer, group, tensors, addresses, constants)
            self._layers[layer.index] = prepared
        return prepared

    def _scales_of(self, layer: AttentionLayer) -> Tensor:
        """Return the scales that the kernels read: the layer's part of the pool, or static ones.

        They are [blocks, 2, kv_heads, block_size]; static ones are those of one block.
        """
        if self._spec.scales is not KVScales.STATIC:
            return self._scales.of(layer.keeper)
        assert layer.k_scale is not None and layer.v_scale is not None
        scales = torch.stack((layer.k_scale, layer.v_scale))
        return scales.view(1, 2, -1, 1).expand(-1, -1, -1, self._spec.block_size).contiguous()


def _sinks_of(layer: AttentionLayer) -> Tensor:
    """Return the score of each head's sink for a softmax in powers of 2."""
    if layer.sinks is None:
        return torch.full((layer.num_heads,), float(LOWEST))
    return layer.sinks.float() * _LOG2E


def _bits(value: float) -> int:
    """Return the bits of a float64, as kernels have integers for arguments."""
    bits: int = np.float64(value).view(np.int64).item()
    return bits
