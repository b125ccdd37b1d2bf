"""Paged latent attention in plain torch, on any device; see `models.latent`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionMetadata, LatentLayer
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.portable.kv_pool import TorchKVPool
from paged_backend.platforms.portable.plans import Call, Plans, rotate


class TorchLatentAttention(AttentionBackend):
    """Owns the rows of all tokens as heads with one vector, see `TorchKVPool`."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self._places = spec.places
        self._rows = TorchKVPool(spec, lambda sizes: sizes.key_dim, num_blocks, device)
        self._plans = Plans(spec.block_size)

    def attend_latent(
        self, layer: LatentLayer, q: Tensor, rows: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        plan = self._plans.of(meta, self._places[layer.index].group, None)
        angles, rank = layer.cos_sin_cache[meta.positions], layer.rank
        rows = rows.unsqueeze(1)
        rows[..., rank:] = rotate(rows[..., rank:], angles)
        q[..., rank:] = rotate(q[..., rank:], angles)
        self._rows.write(layer.index, plan.slots, rows[plan.written], None)
        out = q.new_empty(*q.shape[:2], rank)
        for call in plan.calls:
            out[call.rows] = self._attend(layer, q[call.rows], call).to(q.dtype)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._rows.copy_block(source, target)

    def _attend(self, layer: LatentLayer, q: Tensor, call: Call) -> Tensor:
        """Return the sums [seqs, queries, num_heads, rank] float32 for `q` of one call."""
        rows = self._rows.read(layer.index, call.slots, None).squeeze(2).float()
        scores = torch.einsum("sqhd,skd->sqhk", q.float(), rows) * layer.scale
        visible = call.positions.unsqueeze(-1) >= call.key_positions.unsqueeze(1)
        weights = scores.masked_fill(~visible.unsqueeze(2), -torch.inf).softmax(dim=-1)
        return torch.einsum("sqhk,skr->sqhr", weights, rows[..., : layer.rank])
