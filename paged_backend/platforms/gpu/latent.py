"""Paged latent attention by the Triton kernels of `paged_kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from paged_kernels.latent_attention import LatentPlan, latent_attention, plan_latent
from paged_kernels.latent_rope_cache import latent_rope_cache
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionMetadata, LatentLayer
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.gpu.attention import copy_pool_blocks
from paged_backend.platforms.gpu.step_rows import StepRows
from paged_backend.platforms.gpu.transfer import Transfer


class TritonLatentAttention(AttentionBackend):
    """Owns a pool [group_size, num_blocks, block_size, row_size].

    It starts with zeros, because kernels may multiply unwritten numbers by a weight of 0. The
    arguments are those of `TritonAttention`.
    """

    def __init__(
        self, spec: KVCacheSpec, num_blocks: int, transfer: Transfer, rows: StepRows
    ) -> None:
        self._transfer = transfer
        self._rows = rows
        self._places = spec.places
        row_size = next(iter(spec.sizes.values())).key_dim
        shape = spec.group_size, num_blocks, spec.block_size, row_size
        self._pool = torch.zeros(shape, dtype=spec.dtype, device=transfer.device)
        self._meta: AttentionMetadata | None = None
        self._plan: LatentPlan | None = None

    def cut_rows(self) -> None:
        self._rows.slots = None

    def attend_latent(
        self, layer: LatentLayer, q: Tensor, rows: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        group, part = self._places[layer.index]
        cache, table = self._pool[part], layer.cos_sin_cache
        latent_rope_cache(q, rows, meta.positions, table, cache, meta.slot_mappings[group])
        lengths = meta.seq_lens, meta.query_start_loc
        if self._meta is not meta or self._plan is None:
            self._meta = meta
            self._plan = plan_latent(
                q, cache, *lengths, rank=layer.rank, num_decodes=meta.num_decodes
            )
        return latent_attention(
            q,
            cache,
            meta.block_tables[group],
            *lengths,
            rank=layer.rank,
            scale=layer.scale,
            num_decodes=meta.num_decodes,
            plan=self._plan,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        copy_pool_blocks([self._pool], pairs, self._transfer)
