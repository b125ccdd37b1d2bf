"""Paged attention by the Triton kernels of `paged_kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from paged_kernels.attention_params import AttentionParams
from paged_kernels.block_copy import copy_blocks
from paged_kernels.fused_qk_norm_rope_cache import fused_qk_norm_rope_cache
from paged_kernels.paged_attention import CascadePlan, paged_attention, plan_cascade
from paged_kernels.paged_decode import plan_decode
from paged_kernels.paged_prefill import plan_prefill
from paged_kernels.splits import SplitPlan
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec, KVScales
from paged_backend.platforms.gpu.transfer import Transfer

Pairs = list[tuple[int, int]]


class TritonAttention(AttentionBackend):
    """Owns a pool [group_size, num_blocks, 2, num_kv_heads, block_size, head_dim] of K and V.

    The pool starts with zeros, because kernels may multiply unwritten values by a weight of 0. If
    each token and head has a scale, these are in a separate pool, without the last dimension.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, transfer: Transfer) -> None:
        self._transfer = transfer
        self._has_static_scales = spec.scales is KVScales.STATIC
        self._places = spec.places
        num_heads, head_dim, _ = spec.sizes
        heads = (spec.group_size, num_blocks, 2, num_heads, spec.block_size)
        self._pool = torch.zeros(*heads, head_dim, dtype=spec.dtype, device=transfer.device)
        self._scales: Tensor | None = None
        if spec.scales is KVScales.TOKEN_HEAD:
            self._scales = torch.zeros(heads, dtype=torch.float32, device=transfer.device)
        self._meta: AttentionMetadata | None = None
        # Of that step, by window, and by group if the plan depends on its block table.
        self._plans: dict[tuple[int | None, int | None], SplitPlan | CascadePlan] = {}
        self._prompt_plans: dict[int | None, SplitPlan | None] = {}  # by window

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        group, part = self._places[layer.index]
        cache, qk_norm = self._pool[part], layer.qk_norm
        scales = self._scales_of(layer, part)
        fused_qk_norm_rope_cache(
            qkv,
            meta.positions,
            layer.cos_sin_cache,
            cache,
            meta.slot_mappings[group],
            num_heads=layer.num_heads,
            q_norm=None if qk_norm is None else qk_norm.query,
            k_norm=None if qk_norm is None else qk_norm.key,
            norm_eps=0.0 if qk_norm is None else qk_norm.eps,
            **scales,
        )
        q = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.num_heads]
        params = AttentionParams(
            layer.scale, window=layer.window, softcap=layer.softcap, sinks=layer.sinks, **scales
        )
        attended = paged_attention(
            q,
            cache,
            meta.block_tables[group],
            meta.seq_lens,
            meta.query_start_loc,
            params,
            num_decodes=meta.num_decodes,
            plan=self._plan(q, cache, meta, group, layer.window),
            prompt_plan=self._prompt_plan(q, cache, meta, layer.window),
        )
        return attended.flatten(1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pools = [self._pool] if self._scales is None else [self._pool, self._scales]
        copy_pool_blocks(pools, pairs, self._transfer)

    def _scales_of(self, layer: AttentionLayer, part: int) -> dict[str, Tensor | None]:
        """Return the scales of a layer's cache by the kernels' names for them."""
        if self._scales is not None:
            return {"kv_scales": self._scales[part]}
        if self._has_static_scales:
            return {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        return {}

    def _plan(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, group: int, window: int | None
    ) -> SplitPlan | CascadePlan | None:
        """Return the plan of the decodes; layers with the same window share it.

        A plan with shared blocks depends on the block table, so that there is one for each group.
        """
        if not meta.num_decodes:
            return None
        self._follow(meta)
        # With a window, the shared blocks may be out of sight.
        num_shared = meta.num_shared_blocks if window is None else 0
        key = window, group if num_shared else None
        if key not in self._plans:
            q, lengths = q[: meta.num_decodes], meta.seq_lens[: meta.num_decodes]
            table = meta.block_tables[group][: meta.num_decodes]
            self._plans[key] = (
                plan_cascade(q, cache, table, lengths, num_shared_blocks=num_shared)
                if num_shared
                else plan_decode(q, cache, lengths, window=window)
            )
        return self._plans[key]

    def _prompt_plan(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, window: int | None
    ) -> SplitPlan | None:
        """Return the plan of the prompts; layers with the same window share it."""
        if meta.num_decodes == len(meta.seq_lens):
            return None
        self._follow(meta)
        if window not in self._prompt_plans:
            prompts, first_seq = (meta.seq_lens, meta.query_start_loc), meta.num_decodes
            plan = plan_prefill(q, cache, *prompts, first_seq=first_seq, window=window)
            self._prompt_plans[window] = plan
        return self._prompt_plans[window]

    def _follow(self, meta: AttentionMetadata) -> None:
        """Forget the plans of the step before."""
        if self._meta is not meta:
            self._meta, self._plans, self._prompt_plans = meta, {}, {}


def copy_pool_blocks(
    pools: Sequence[Tensor], pairs: Sequence[tuple[int, int]], transfer: Transfer
) -> None:
    """Copy each pair's first block over its second, in all parts of some pools, one after another.

    Args:
        pools: [group_size, num_blocks, ...] each, on the device.
        pairs: the blocks.
        transfer: sends the blocks' ids to the device.
    """
    for run in _independent_runs(pairs):
        sources, targets = (
            transfer.send(np.array(ids, np.int32)) for ids in zip(*run, strict=True)
        )
        for pool in pools:
            copy_blocks(pool, pool, sources, targets)


def _independent_runs(pairs: Sequence[tuple[int, int]]) -> Iterator[Pairs]:
    """Split copies, in their order, into runs of copies that can be made in parallel."""
    run: Pairs = []
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target in pairs:
        if source in targets or target in sources | targets:
            yield run
            run, sources, targets = [], set(), set()
        run.append((source, target))
        sources.add(source)
        targets.add(target)
    if run:
        yield run
