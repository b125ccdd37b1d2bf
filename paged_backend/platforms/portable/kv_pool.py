"""The keys, or the values, of all tokens in a paged KV cache, in any format."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.models.kv_cache import KVCacheSpec, KVScales

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class TorchKVPool:
    """Numbers [group_size, num_slots, num_kv_heads, head_dim], and their scales if they have any.

    A slot holds one token; its number is block * block_size + offset.
    """

    def __init__(
        self, spec: KVCacheSpec, head_dim: int, num_blocks: int, device: torch.device
    ) -> None:
        self._spec = spec
        shape = spec.group_size, num_blocks * spec.block_size, spec.sizes.num_heads
        self._numbers = torch.zeros(*shape, head_dim, dtype=spec.dtype, device=device)
        has_scales = spec.scales is KVScales.TOKEN_HEAD
        self._scales = torch.ones(shape, device=device) if has_scales else None

    def write(self, part: int, slots: Tensor, x: Tensor, static_scale: Tensor | None) -> None:
        """Store `x` [tokens, num_kv_heads, head_dim] in slots [tokens] int64.

        Args:
            part: the part of the pool, one of a layer of each group.
            slots: where to.
            x: the keys or values.
            static_scale: [num_kv_heads] float32; used if the format has static scales.
        """
        if self._spec.scales is KVScales.NONE:
            self._numbers[part, slots] = x.to(self._spec.dtype)
            return
        scale = static_scale
        if self._scales is not None:
            scale = token_head_scales(x, self._spec.dtype)
            self._scales[part, slots] = scale
        assert scale is not None, "the format has static scales, which the layer lacks"
        # torch has no indexed assignment for float8, so its bytes are stored instead.
        stored = quantize(x, scale, self._spec.dtype).view(torch.uint8)
        self._numbers.view(torch.uint8)[part, slots] = stored

    def read(self, part: int, slots: Tensor, static_scale: Tensor | None) -> Tensor:
        """Return what is stored in `slots` [...]: [..., num_kv_heads, head_dim]."""
        if self._spec.scales is KVScales.NONE:
            return self._numbers[part, slots]
        numbers = self._numbers.view(torch.uint8)[part, slots].view(self._spec.dtype).float()
        scale = static_scale if self._scales is None else self._scales[part, slots]
        assert scale is not None, "the format has static scales, which the layer lacks"
        return numbers * scale.unsqueeze(-1)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block over another one, in all parts."""
        size = self._spec.block_size
        old, new = (slice(block * size, (block + 1) * size) for block in (source, target))
        self._numbers[:, new] = self._numbers[:, old]
        if self._scales is not None:
            self._scales[:, new] = self._scales[:, old]


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
