"""Paged attention by the Triton kernels of `paged_kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from paged_kernels.attention_params import MAX_HEAD_DIM, AttentionParams
from paged_kernels.block_copy import copy_blocks
from paged_kernels.fused_qk_norm_rope_cache import fused_qk_norm_rope_cache
from paged_kernels.paged_attention import CascadePlan, paged_attention, plan_cascade
from paged_kernels.paged_decode import plan_decode
from paged_kernels.paged_prefill import plan_prefill
from paged_kernels.splits import SplitPlan
from paged_kernels.windows import Chunks as KernelChunks
from paged_kernels.windows import Window as KernelWindow
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec, KVScales
from paged_backend.models.kv_pool import PoolTensor
from paged_backend.platforms.gpu.step_rows import StepRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import KVSizes
from paged_backend.values.windows import Chunks, Window

Pairs = list[tuple[int, int]]


class PlanShape(NamedTuple):
    """What the plan of a step's splits depends on, beside its lengths."""

    window: Window | None
    kept: KVSizes


class TritonAttention(AttentionBackend):
    """Owns the pool of K and V, for each layer [blocks, 2, num_kv_heads, block_size, head_dim].

    The pool starts with zeros, because kernels may multiply unwritten values by a weight of 0. If
    each token and head has a scale, these are in a separate pool, without the last dimension. See
    `PoolTensor` for the layers in a pool.

    Args:
        spec: the layers.
        num_blocks: number of blocks of the pool.
        transfer: the way to the device.
        rows: the rows of the step that runs.

    Raises:
        ConfigError: the kernels cannot read heads of this size.
    """

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int, transfer: Transfer, rows: StepRows
    ) -> None:
        self._transfer = transfer
        self._rows = rows
        self._has_static_scales = spec.scales is KVScales.STATIC
        self._places = spec.places

        def heads(sizes: KVSizes) -> tuple[int, int, int]:
            return 2, sizes.num_heads, spec.block_size

        def numbers(sizes: KVSizes) -> tuple[int, int, int, int]:
            return *heads(sizes), sizes.key_dim

        for sizes in set(spec.sizes.values()):
            if sizes.key_dim > MAX_HEAD_DIM:
                raise ConfigError(
                    f"head_dim must be at most {MAX_HEAD_DIM} for the kernels of a GPU, got "
                    f"{sizes.key_dim}"
                )
        zeros = partial(torch.zeros, device=transfer.device)
        self._pool = PoolTensor(spec, num_blocks, numbers, partial(zeros, dtype=spec.dtype))
        self._scales: PoolTensor | None = None
        if spec.scales is KVScales.TOKEN_HEAD:
            self._scales = PoolTensor(spec, num_blocks, heads, zeros)
        self._meta: AttentionMetadata | None = None
        # Of that step, by shape, and by group if the plan depends on its block table.
        self._plans: dict[tuple[PlanShape, int | None], SplitPlan | CascadePlan] = {}
        self._prompt_plans: dict[PlanShape, SplitPlan | None] = {}

    def cut_rows(self) -> None:
        self._rows.slots = None

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        qkv = qkv.contiguous()
        group, shape = self._places[layer.keeper].group, PlanShape(layer.window, layer.kept)
        cache, qk_norm = self._pool.of(layer.keeper), layer.qk_norm
        scales = self._scales_of(layer)
        fused_qk_norm_rope_cache(
            qkv,
            meta.positions,
            layer.cos_sin_cache,
            cache,
            meta.slot_mappings[group] if layer.keeps_tokens else None,
            num_heads=layer.num_heads,
            q_norm=None if qk_norm is None else qk_norm.query,
            k_norm=None if qk_norm is None else qk_norm.key,
            norm_eps=0.0 if qk_norm is None else qk_norm.eps,
            **scales,
        )
        q = qkv.view(len(qkv), -1, layer.head_dim)[:, : layer.num_heads]
        params = AttentionParams(
            layer.scale,
            window=_kernel_window(layer.window),
            softcap=layer.softcap,
            sinks=layer.sinks,
            **scales,
        )
        attended = paged_attention(
            q,
            cache,
            meta.block_tables[group],
            meta.seq_lens,
            meta.query_start_loc,
            params,
            num_decodes=meta.num_decodes,
            plan=self._plan(q, cache, meta, group, shape),
            prompt_plan=self._prompt_plan(q, cache, meta, shape),
        )
        return attended.flatten(1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        pools = [pool.memory for pool in (self._pool, self._scales) if pool is not None]
        copy_pool_blocks(pools, pairs, self._transfer)

    def _scales_of(self, layer: AttentionLayer) -> dict[str, Tensor | None]:
        """Return the scales of a layer's cache by the kernels' names for them."""
        if self._scales is not None:
            return {"kv_scales": self._scales.of(layer.keeper)}
        if self._has_static_scales:
            return {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        return {}

    def _plan(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, group: int, shape: PlanShape
    ) -> SplitPlan | CascadePlan | None:
        """Return the plan of the decodes; layers of the same shape share it.

        A plan with shared blocks depends on the block table, so that there is one for each group.
        """
        if not meta.num_decodes:
            return None
        self._follow(meta)
        # With a window, the shared blocks may be out of sight.
        num_shared = meta.num_shared_blocks if shape.window is None else 0
        key = shape, group if num_shared else None
        if key not in self._plans:
            q, lengths = q[: meta.num_decodes], meta.seq_lens[: meta.num_decodes]
            table = meta.block_tables[group][: meta.num_decodes]
            self._plans[key] = (
                plan_cascade(q, cache, table, lengths, num_shared_blocks=num_shared)
                if num_shared
                else plan_decode(q, cache, lengths, window=_kernel_window(shape.window))
            )
        return self._plans[key]

    def _prompt_plan(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, shape: PlanShape
    ) -> SplitPlan | None:
        """Return the plan of the prompts; layers of the same shape share it."""
        if meta.num_decodes == len(meta.seq_lens):
            return None
        self._follow(meta)
        if shape not in self._prompt_plans:
            prompts, first_seq = (meta.seq_lens, meta.query_start_loc), meta.num_decodes
            window = _kernel_window(shape.window)
            plan = plan_prefill(q, cache, *prompts, first_seq=first_seq, window=window)
            self._prompt_plans[shape] = plan
        return self._prompt_plans[shape]

    def _follow(self, meta: AttentionMetadata) -> None:
        """Forget the plans of the step before."""
        if self._meta is not meta:
            self._meta, self._plans, self._prompt_plans = meta, {}, {}


def _kernel_window(window: Window | None) -> KernelWindow | None:
    """Return a window as the kernels name it."""
    return KernelChunks(window.size) if isinstance(window, Chunks) else window


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
