"""Reference for writing a step's keys and values, token by token in float64."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMITS = {torch.float8_e4m3fn: 448, torch.int8: 127}


def fused_qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Reference for the kernel of the same name, in float64; it works in place as well."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = torch.split(heads.double(), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = cos_sin_cache[positions.long()].double().unsqueeze(1)
    heads[:, :num_heads] = _rotate(_norm(q, q_norm, norm_eps), angles).to(qkv.dtype)
    k = _rotate(_norm(k, k_norm, norm_eps), angles)
    if kv_scales is None:
        k_scales, v_scales = (s if s is None else s.expand(len(k), -1) for s in (k_scale, v_scale))
    else:
        k_scales, v_scales = (_scales(heads, kv_cache.dtype) for heads in (k, v))
    k = _quantize(k, k_scales, kv_cache.dtype)
    v = _quantize(v, v_scales, kv_cache.dtype)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // block_size, 0, :, slot % block_size] = k[token]
            kv_cache[slot // block_size, 1, :, slot % block_size] = v[token]
            if kv_scales is not None and k_scales is not None and v_scales is not None:
                kv_scales[slot // block_size, 0, :, slot % block_size] = k_scales[token]
                kv_scales[slot // block_size, 1, :, slot % block_size] = v_scales[token]


def _norm(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return heads
    return heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    (x, y), (cos, sin) = heads.chunk(2, dim=-1), angles.chunk(2, dim=-1)
    return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)


def _scales(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale [tokens, num_kv_heads] float32 of each head."""
    scales = (heads.abs().amax(-1) / _LIMITS[dtype]).float()
    return torch.where(scales == 0, 1.0, scales)


def _quantize(heads: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return heads.to(dtype)
    limit = _LIMITS[dtype]
    units = (heads / scales.double().unsqueeze(-1)).clamp(-limit, limit)
    return (units.round() if dtype == torch.int8 else units).to(dtype)
