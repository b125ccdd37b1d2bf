"""Paged attention in plain torch, on any device: it gathers each sequence's blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.portable.kv_pool import TorchKVPool
from paged_backend.platforms.portable.layers import norm_heads
from paged_backend.platforms.portable.plans import Call, Plans, first_visible, rotate


class TorchAttention(AttentionBackend):
    """Owns the keys and the values of all layers, see `TorchKVPool`."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self._places = spec.places
        self._keys = TorchKVPool(spec, lambda sizes: sizes.key_dim, num_blocks, device)
        self._values = TorchKVPool(spec, lambda sizes: sizes.value_dim, num_blocks, device)
        self._plans = Plans(spec.block_size)

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        qkv = qkv.contiguous()
        plan = self._plans.of(meta, self._places[layer.keeper].group, layer.window)
        if layer.qk_norm is not None:
            norm_heads(qkv, layer.qk_norm.heads, layer.qk_norm.eps)
        num_heads, angles = layer.num_heads, layer.cos_sin_cache[meta.positions]
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        q = rotate(heads[:, :num_heads], angles)
        if layer.keeps_tokens:
            k, v = heads[:, num_heads:].chunk(2, dim=1)
            keys = rotate(k, angles)[plan.written]
            self._keys.write(layer.index, plan.slots, keys, layer.k_scale)
            self._values.write(layer.index, plan.slots, v[plan.written], layer.v_scale)
        out = torch.empty_like(q)
        for call in plan.calls:
            out[call.rows] = self._attend(layer, q[call.rows], call)
        return out.flatten(1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._keys.copy_block(source, target)
            self._values.copy_block(source, target)

    def _attend(self, layer: AttentionLayer, q: Tensor, call: Call) -> Tensor:
        distance = call.positions.unsqueeze(-1) - call.key_positions.unsqueeze(1)
        visible = distance >= 0
        if layer.window is not None:
            first = first_visible(call.positions, layer.window)
            visible &= call.key_positions.unsqueeze(1) >= first.unsqueeze(-1)
        keys = self._keys.read(layer.keeper, call.slots, layer.k_scale).to(q.dtype)
        values = self._values.read(layer.keeper, call.slots, layer.v_scale).to(q.dtype)
        if layer.softcap is not None or layer.sinks is not None:
            return _attend_with_options(layer, q, keys, values, visible)
        attended = scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible.unsqueeze(1),
            scale=layer.scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2)


def _attend_with_options(
    layer: AttentionLayer, q: Tensor, keys: Tensor, values: Tensor, visible: Tensor
) -> Tensor:
    """Attend with a soft cap and sinks, which torch's function lacks.

    Args:
        layer: the layer.
        q: [seqs, queries, num_heads, head_dim].
        keys: [seqs, keys, num_kv_heads, head_dim].
        values: the same.
        visible: [seqs, queries, keys] bool.
    """
    group = layer.num_heads // layer.num_kv_heads
    keys, values = (x.float().repeat_interleave(group, dim=2) for x in (keys, values))
    scores = torch.einsum("sqhd,skhd->shqk", q.float(), keys) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    return torch.einsum("shqk,skhd->sqhd", weights, values).to(q.dtype)
