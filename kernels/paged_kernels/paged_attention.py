"""Attention of a mixed batch (decodes and prefill chunks) over one paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kernels.attention_params import AttentionParams
from paged_kernels.errors import check, check_tensor
from paged_kernels.merge_attention import merge_attention
from paged_kernels.paged_decode import (
    check_cache,
    check_out,
    check_q,
    paged_decode,
    plan_decode,
)
from paged_kernels.paged_prefill import paged_prefill
from paged_kernels.splits import SplitPlan


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """Plans for the blocks that all decodes share and for their own; made once for all layers."""

    shared_table: Tensor  # [1, max_blocks] int32
    shared_lens: Tensor  # [1] int32
    shared: SplitPlan
    own_table: Tensor  # [num_seqs, max_blocks - shared blocks] int32
    own_lens: Tensor  # [num_seqs] int32
    own: SplitPlan


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    num_decodes: int = 0,
    plan: SplitPlan | CascadePlan | None = None,
    prompt_plan: SplitPlan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of each sequence's last tokens over all its keys in the cache.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32; each head contiguous, rows may be
            slices of wider rows. Sequence `s` has rows `query_start_loc[s]` to
            `query_start_loc[s + 1]`.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim] in the dtype of `q`, fp8
            (e4m3) or int8; already holds the keys of `q`'s own tokens.
        block_table: [num_seqs, max_blocks] int32; entries past a sequence's last block
            and before the window of its first query are ignored.
        seq_lens: [num_seqs] int32, number of keys per sequence, including the keys of `q`'s tokens.
        query_start_loc: [num_seqs + 1] int32.
        params: options of the attention scores.
        num_decodes: number of leading sequences with exactly one query token, which take the
            faster decode path; no length is read on the host.
        plan: plan of the decodes, if several layers share it: from
            :func:`paged_kernels.plan_decode`, or from :func:`plan_cascade` if the decodes begin
            with the same blocks.
        prompt_plan: plan of all sequences but the decodes: from :func:`paged_kernels.plan_prefill`.
        out: like `q`, filled and returned; contiguous if blocks are shared.
        lse: [num_tokens, num_heads] float32, filled with the natural log-sum-exp of the scores;
            None if blocks are shared.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_q(q)
    num_seqs = len(seq_lens)
    in_range = 0 <= num_decodes <= min(num_seqs, len(q))
    check(in_range, "num_decodes", f"must be from 0 to the sequences, got {num_decodes}")
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, like=q)
    out = check_out(q, out, lse)
    if isinstance(plan, CascadePlan):
        check(lse is None, "lse", "does not go with shared blocks")
        cascade_decode(q[:num_decodes], kv_cache, params, plan, out=out[:num_decodes])
    elif num_decodes:
        paged_decode(
            q[:num_decodes],
            kv_cache,
            block_table[:num_decodes],
            seq_lens[:num_decodes],
            params,
            plan=plan,
            out=out[:num_decodes],
            lse=None if lse is None else lse[:num_decodes],
        )
    if num_decodes < num_seqs:
        paged_prefill(
            q,
            kv_cache,
            block_table,
            seq_lens,
            query_start_loc,
            params,
            first_seq=num_decodes,
            plan=prompt_plan,
            out=out,
            lse=lse,
        )
    return out


def plan_cascade(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    num_shared_blocks: int,
) -> CascadePlan:
    """Plan :func:`cascade_decode`, without reading a length on the host.

    Args:
        q: as for `cascade_decode`; only its shape and dtype matter.
        kv_cache: as for `cascade_decode`; only its shape and dtype matter.
        block_table: [num_seqs, max_blocks] int32, the first `num_shared_blocks` equal in all rows.
        seq_lens: [num_seqs] int32, each longer than the shared blocks.
        num_shared_blocks: number of shared blocks, at least 1.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_q(q)
    check_cache(q, kv_cache, block_table, len(q))
    check_tensor("seq_lens", seq_lens, (len(q),), torch.int32, like=q)
    in_range = 1 <= num_shared_blocks < block_table.shape[1]
    check(in_range, "num_shared_blocks", f"must be from 1 to the table, got {num_shared_blocks}")
    num_shared = num_shared_blocks * kv_cache.shape[3]
    shared_lens = torch.full((1,), num_shared, dtype=torch.int32, device=q.device)
    own_lens = seq_lens - num_shared
    return CascadePlan(
        shared_table=block_table[:1],
        shared_lens=shared_lens,
        shared=plan_decode(q, kv_cache, shared_lens, has_lse=True),
        own_table=block_table[:, num_shared_blocks:].contiguous(),
        own_lens=own_lens,
        own=plan_decode(q, kv_cache, own_lens, has_lse=True),
    )


def cascade_decode(
    q: Tensor,
    kv_cache: Tensor,
    params: AttentionParams,
    plan: CascadePlan,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Decode sequences that begin with the same blocks, which are read once for all of them.

    All queries attend to the shared blocks together, and each one separately to its own blocks;
    the two results are merged (Ye et al., 2025, section 3.2.1, "composable formats").

    Args:
        q: [num_seqs, num_heads, head_dim], one query for each sequence.
        kv_cache: as for :func:`paged_attention`.
        params: options without a window.
        plan: plan from :func:`plan_cascade` with the same shapes.
        out: like `q`, contiguous, filled and returned.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_q(q)
    check(params.window is None, "window", "does not go with shared blocks")
    shared_lse, own_lse = (
        torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2)
    )
    shared = paged_decode(
        q,
        kv_cache,
        plan.shared_table,
        plan.shared_lens,
        params.without_sinks(),
        plan=plan.shared,
        lse=shared_lse,
    )
    own = paged_decode(
        q, kv_cache, plan.own_table, plan.own_lens, params, plan=plan.own, out=out, lse=own_lse
    )
    return merge_attention(shared, shared_lse, own, own_lse, out=own)
