"""Paged attention in plain torch, on any device: it gathers each sequence's blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.torch.kv_pool import TorchKVPool
from paged_backend.platforms.torch.layers import norm_heads


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with the same number of queries, attended in one call."""

    rows: Tensor  # [seqs, queries] rows of the batch
    positions: Tensor  # [seqs, queries] their positions
    slots: Tensor  # [seqs, keys] slots of the keys at positions 0, 1, ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """The indexes that all layers of a step share."""

    meta: AttentionMetadata
    written: Tensor  # rows of the batch that have a slot
    groups: list[_Group]


class TorchAttention(AttentionBackend):
    """Owns the keys and the values, each [num_layers, num_slots, num_kv_heads, head_dim].

    A slot holds one token; its number is block * block_size + offset.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self._spec = spec
        self._keys = TorchKVPool(spec, num_blocks, device)
        self._values = TorchKVPool(spec, num_blocks, device)
        self._plan: _Plan | None = None

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        plan = self._plan_for(meta)
        if layer.qk_norm is not None:
            norm_heads(qkv, layer.qk_norm.heads, layer.qk_norm.eps)
        num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        angles = layer.cos_sin_cache[meta.positions]
        slots = meta.slot_mapping[plan.written]
        self._keys.write(layer.index, slots, _rotate(k, angles)[plan.written], layer.k_scale)
        self._values.write(layer.index, slots, v[plan.written], layer.v_scale)
        q = _rotate(q, angles)
        out = torch.empty_like(q)
        for group in plan.groups:
            out[group.rows] = self._attend_group(layer, q[group.rows], group)
        return out.flatten(1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._keys.copy_block(source, target)
            self._values.copy_block(source, target)

    def _plan_for(self, meta: AttentionMetadata) -> _Plan:
        if self._plan is None or self._plan.meta is not meta:
            self._plan = _make_plan(meta, self._spec.block_size)
        return self._plan

    def _attend_group(self, layer: AttentionLayer, q: Tensor, group: _Group) -> Tensor:
        key_positions = torch.arange(group.slots.shape[1], device=q.device)
        distance = group.positions.unsqueeze(-1) - key_positions
        visible = distance >= 0
        if layer.window is not None:
            visible &= distance < layer.window
        keys = self._keys.read(layer.index, group.slots, layer.k_scale).to(q.dtype)
        values = self._values.read(layer.index, group.slots, layer.v_scale).to(q.dtype)
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


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the two halves of each head of `x` [tokens, heads, head_dim] by its angles."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def _make_plan(meta: AttentionMetadata, block_size: int) -> _Plan:
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for seq, length in enumerate(meta.query_start_loc.diff().tolist()):
        by_length[length].append(seq)
    groups = [_make_group(meta, seqs, length, block_size) for length, seqs in by_length.items()]
    written = (meta.slot_mapping >= 0).nonzero().squeeze(1)
    return _Plan(meta, written, groups)


def _make_group(meta: AttentionMetadata, seqs: list[int], length: int, block_size: int) -> _Group:
    device = meta.slot_mapping.device
    index = torch.tensor(seqs, device=device)
    queries = torch.arange(length, device=device)
    seq_lens = meta.seq_lens[index].long().unsqueeze(1)
    rows = meta.query_start_loc[index].long().unsqueeze(1) + queries
    keys = torch.arange(int(seq_lens.max()), device=device)
    blocks = meta.block_table[index].long()[:, keys // block_size]
    return _Group(rows, seq_lens - length + queries, blocks * block_size + keys % block_size)
