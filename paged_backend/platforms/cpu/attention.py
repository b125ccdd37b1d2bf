"""Paged attention on the CPU: the pool, and calls of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec, KVScales
from paged_backend.platforms.cpu.amx_attention import amx_kernels
from paged_backend.platforms.cpu.attention_tiles import LOWEST
from paged_backend.platforms.cpu.layers import norm_heads
from paged_backend.platforms.cpu.vector_attention import vector_kernels

_LOG2E = math.log2(math.e)
_NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True)
class _Place:
    """What a layer's kernels read: its part of the pool, and constants of the layer."""

    layer: AttentionLayer
    tensors: tuple[Tensor, ...]  # keys, values, scales, sinks; kept alive
    addresses: tuple[int, ...]  # of the tensors
    constants: tuple[int, ...]  # the kernels' last arguments


class CpuAttention(AttentionBackend):
    """Owns a pool of keys and a pool of values [layers, blocks, kv_heads, head_dim * block_size].

    Keys are [head_dim, block_size] there, and values are [block_size, head_dim]; both are read
    along their last dimension. On AMX, pairs of numbers of the first dimension lie together.
    Scales, if each token and head has them, are [layers, blocks, 2, kv_heads, block_size] float32:
    those of the keys, then those of the values.

    Args:
        spec: the shape and format of the pool.
        num_blocks: its number of blocks.
        amx: compute on AMX units, which needs bf16 numbers and a shape that `fits`.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, *, amx: bool = False) -> None:
        self._spec = spec
        self._num_blocks = num_blocks
        self._write, self._attend = amx_kernels() if amx else vector_kernels(spec.dtype)
        numbers = spec.head_dim * spec.block_size
        shape = spec.num_layers, num_blocks, spec.num_kv_heads, numbers
        self._keys, self._values = (torch.zeros(shape, dtype=spec.dtype) for _ in range(2))
        scale_blocks = num_blocks if spec.scales is KVScales.TOKEN_HEAD else 0
        self._scales = torch.ones(
            spec.num_layers, scale_blocks, 2, spec.num_kv_heads, spec.block_size
        )
        self._places: dict[int, _Place] = {}

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        qkv = qkv.contiguous()
        if layer.qk_norm is not None:
            norm_heads(qkv, layer.qk_norm.heads, layer.qk_norm.eps)
        place = self._place(layer)
        out = torch.empty(qkv.shape[0], layer.num_heads * layer.head_dim)
        arguments = (
            qkv.data_ptr(),
            layer.cos_sin_cache.data_ptr(),
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
            meta.block_table.data_ptr(),
            meta.slot_mapping.data_ptr(),
            *place.addresses,
            out.data_ptr(),
            qkv.shape[0],
            layer.cos_sin_cache.shape[0],
            *meta.block_table.shape,
            *place.constants,
        )
        self._write(*arguments)
        self._attend(*arguments)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for pool in (self._keys, self._values, self._scales):
                if pool.numel():
                    pool[:, target] = pool[:, source]

    def _place(self, layer: AttentionLayer) -> _Place:
        place = self._places.get(layer.index)
        if place is None or place.layer is not layer:
            tensors = (
                self._keys[layer.index],
                self._values[layer.index],
                self._scales_of(layer),
                _sinks_of(layer),
            )
            constants = (
                self._num_blocks,
                int(self._spec.scales is KVScales.TOKEN_HEAD),
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                self._spec.block_size,
                _bits(layer.scale * _LOG2E),
                _bits((layer.softcap or 0.0) * _LOG2E),
                _NO_WINDOW if layer.window is None else layer.window,
            )
            addresses = tuple(tensor.data_ptr() for tensor in tensors)
            place = _Place(layer, tensors, addresses, constants)
            self._places[layer.index] = place
        return place

    def _scales_of(self, layer: AttentionLayer) -> Tensor:
        """Return the scales that the kernels read: the layer's part of the pool, or static ones."""
        if self._spec.scales is not KVScales.STATIC:
            return self._scales[layer.index]
        assert layer.k_scale is not None and layer.v_scale is not None
        scales = torch.stack((layer.k_scale, layer.v_scale))
        return scales.unsqueeze(-1).expand(-1, -1, self._spec.block_size).contiguous()


def _sinks_of(layer: AttentionLayer) -> Tensor:
    """Return the score of each head's sink for a softmax in powers of 2."""
    if layer.sinks is None:
        return torch.full((layer.num_heads,), float(LOWEST))
    return layer.sinks.float() * _LOG2E


def _bits(value: float) -> int:
    """Return the bits of a float64, as kernels have integers for arguments."""
    bits: int = np.float64(value).view(np.int64).item()
    return bits
