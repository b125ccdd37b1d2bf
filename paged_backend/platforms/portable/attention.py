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
from paged_backend.platforms.portable.kv_pool import TorchKVPool
from paged_backend.platforms.portable.layers import norm_heads


@dataclass(frozen=True, slots=True)
class _Call:
    """Sequences with the same number of queries, attended in one call."""

    rows: Tensor  # [seqs, queries] rows of the batch
    positions: Tensor  # [seqs, queries] their positions
    slots: Tensor  # [seqs, keys] slots of the keys that a query sees
    key_positions: Tensor  # [seqs, keys] their positions


@dataclass(frozen=True, slots=True)
class _Plan:
    """The indexes that all layers with the same block table and window share in a step."""

    written: Tensor  # rows of the batch that have a slot
    slots: Tensor  # slots of these rows
    calls: list[_Call]


class TorchAttention(AttentionBackend):
    """Owns the keys and the values, each [group_size, num_slots, num_kv_heads, head_dim].

    A slot holds one token; its number is block * block_size + offset.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self._block_size = spec.block_size
        self._places = spec.places
        self._keys = TorchKVPool(spec, spec.sizes.key_dim, num_blocks, device)
        self._values = TorchKVPool(spec, spec.sizes.value_dim, num_blocks, device)
        self._meta: AttentionMetadata | None = None
        # The plans of that step, by group and window.
        self._plans: dict[tuple[int, int | None], _Plan] = {}

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        group, part = self._places[layer.index]
        plan = self._plan(meta, group, layer.window)
        if layer.qk_norm is not None:
            norm_heads(qkv, layer.qk_norm.heads, layer.qk_norm.eps)
        num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        angles = layer.cos_sin_cache[meta.positions]
        self._keys.write(part, plan.slots, _rotate(k, angles)[plan.written], layer.k_scale)
        self._values.write(part, plan.slots, v[plan.written], layer.v_scale)
        q = _rotate(q, angles)
        out = torch.empty_like(q)
        for call in plan.calls:
            out[call.rows] = self._attend(layer, part, q[call.rows], call)
        return out.flatten(1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._keys.copy_block(source, target)
            self._values.copy_block(source, target)

    def _plan(self, meta: AttentionMetadata, group: int, window: int | None) -> _Plan:
        if self._meta is not meta:
            self._meta, self._plans = meta, {}
        if (group, window) not in self._plans:
            self._plans[group, window] = _make_plan(meta, group, window, self._block_size)
        return self._plans[group, window]

    def _attend(self, layer: AttentionLayer, part: int, q: Tensor, call: _Call) -> Tensor:
        distance = call.positions.unsqueeze(-1) - call.key_positions.unsqueeze(1)
        visible = distance >= 0
        if layer.window is not None:
            visible &= distance < layer.window
        keys = self._keys.read(part, call.slots, layer.k_scale).to(q.dtype)
        values = self._values.read(part, call.slots, layer.v_scale).to(q.dtype)
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


def _make_plan(meta: AttentionMetadata, group: int, window: int | None, block_size: int) -> _Plan:
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for seq, length in enumerate(meta.query_start_loc.diff().tolist()):
        by_length[length].append(seq)
    table = meta.block_tables[group]
    calls = [
        _make_call(meta, table, seqs, length, window, block_size)
        for length, seqs in by_length.items()
    ]
    slots = meta.slot_mappings[group]
    written = (slots >= 0).nonzero().squeeze(1)
    return _Plan(written, slots[written], calls)


def _make_call(
    meta: AttentionMetadata,
    table: Tensor,
    seqs: list[int],
    length: int,
    window: int | None,
    block_size: int,
) -> _Call:
    index = torch.tensor(seqs, device=table.device)
    queries = torch.arange(length, device=table.device)
    seq_lens = meta.seq_lens[index].long().unsqueeze(1)
    rows = meta.query_start_loc[index].long().unsqueeze(1) + queries
    first = torch.zeros_like(seq_lens)
    if window is not None:  # blocks before the window of the first query may have other owners
        first = (seq_lens - length - window + 1).clamp_(min=0)
    keys = first + torch.arange(int((seq_lens - first).max()), device=table.device)
    real = torch.minimum(keys, seq_lens - 1)  # keys that the sequence has; others are not visible
    blocks = table[index].long().gather(1, real // block_size)
    slots = blocks * block_size + real % block_size
    return _Call(rows, seq_lens - length + queries, slots, keys)
