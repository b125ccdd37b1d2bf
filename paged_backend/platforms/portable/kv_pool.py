"""The keys, or the values, of all tokens in a paged KV cache, in any format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paged_backend.models.kv_cache import KVCacheSpec, KVScales
from paged_backend.models.kv_pool import PoolTensor
from paged_backend.values.kv_cache_groups import KVSizes

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class TorchKVPool:
    """Numbers [num_blocks, block_size, num_kv_heads, size] of each layer, and any scales of them.

    A slot holds one token; its number is block * block_size + offset.

    Args:
        spec: the layers, and the format.
        size_of: the size of a head's numbers in a layer.
        num_blocks: the number of blocks.
        device: where the pool is.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        size_of: Callable[[KVSizes], int],
        num_blocks: int,
        device: torch.device,
    ) -> None:
        def heads(sizes: KVSizes) -> tuple[int, int]:
            return spec.block_size, sizes.num_heads

        def numbers(sizes: KVSizes) -> tuple[int, int, int]:
            return *heads(sizes), size_of(sizes)

        zeros = partial(torch.zeros, dtype=spec.dtype, device=device)
        self._spec = spec
        self._numbers = PoolTensor(spec, num_blocks, numbers, zeros)
        self._scales: PoolTensor | None = None
        if spec.scales is KVScales.TOKEN_HEAD:
            self._scales = PoolTensor(spec, num_blocks, heads, partial(torch.ones, device=device))

    def write(self, layer: int, slots: Tensor, x: Tensor, static_scale: Tensor | None) -> None:
        """Store `x` [tokens, num_kv_heads, size] in slots [tokens] int64.

        Args:
            layer: number of the layer that keeps them.
            slots: where to.
            x: the keys or values.
            static_scale: [num_kv_heads] float32; used if the format has static scales.
        """
        place, numbers = self._place(slots), self._numbers.of(layer)
        if self._spec.scales is KVScales.NONE:
            numbers[place] = x.to(self._spec.dtype)
            return
        scale = static_scale
        if self._scales is not None:
            scale = token_head_scales(x, self._spec.dtype)
            self._scales.of(layer)[place] = scale
        assert scale is not None, "the format has static scales, which the layer lacks"
        # torch has no indexed assignment for float8, so its bytes are stored instead.
        stored = quantize(x, scale, self._spec.dtype).view(torch.uint8)
        numbers.view(torch.uint8)[place] = stored

    def read(self, layer: int, slots: Tensor, static_scale: Tensor | None) -> Tensor:
        """Return what is stored in `slots` [...]: [..., num_kv_heads, size]."""
        place, stored = self._place(slots), self._numbers.of(layer)
        if self._spec.scales is KVScales.NONE:
            return stored[place]
        numbers = stored.view(torch.uint8)[place].view(self._spec.dtype).float()
        scale = static_scale if self._scales is None else self._scales.of(layer)[place]
        assert scale is not None, "the format has static scales, which the layer lacks"
        return numbers * scale.unsqueeze(-1)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block over another one, in all layers."""
        self._numbers.copy_block(source, target)
        if self._scales is not None:
            self._scales.copy_block(source, target)

    def _place(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block and the place in it of each slot."""
        return slots // self._spec.block_size, slots % self._spec.block_size


def token_head_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of each head of each token [tokens, heads] for `x` [tokens, heads, dim].

    The largest absolute value of a head becomes the largest number of the dtype.
    """
    largest = x.float().abs().amax(dim=-1)
    return torch.where(largest > 0, largest / _LARGEST[dtype], 1.0)


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / scale in int8 or float8, to the nearest number and ties to the even one.

    Args:
        x: [tokens, heads, dim].
        scale: [tokens, heads] or [heads].
        dtype: dtype of the result.
    """
    largest = _LARGEST[dtype]
    quotient = (x.float() / scale.unsqueeze(-1)).clamp(-largest, largest)
    return (quotient.round() if dtype == torch.int8 else quotient).to(dtype)
