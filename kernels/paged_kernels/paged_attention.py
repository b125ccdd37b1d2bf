"""Attention of a mixed batch (decodes and prefill chunks) over one paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels.attention_params import AttentionParams
from paged_kernels.errors import check, check_tensor
from paged_kernels.merge_attention import merge_attention
from paged_kernels.paged_decode import DecodePlan, check_cache, check_out, check_q, paged_decode
from paged_kernels.paged_prefill import paged_prefill


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    num_decodes: int = 0,
    plan: DecodePlan | None = None,
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
        block_table: [num_seqs, max_blocks] int32; entries past a sequence's last block are ignored.
        seq_lens: [num_seqs] int32, number of keys per sequence, including those of `q`'s tokens.
        query_start_loc: [num_seqs + 1] int32.
        params: options of the attention scores.
        num_decodes: number of leading sequences with exactly one query token, which take the
            faster decode path; no length is read on the host.
        plan: :func:`paged_kernels.plan_decode` of the decodes, if several layers share it.
        out: like `q`, filled and returned.
        lse: [num_tokens, num_heads] float32, filled with the natural log-sum-exp of the scores.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_q(q)
    num_seqs = len(seq_lens)
    in_range = 0 <= num_decodes <= min(num_seqs, len(q))
    check(in_range, "num_decodes", f"must be from 0 to the sequences, got {num_decodes}")
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, like=q)
    out = check_out(q, out, lse)
    if num_decodes:
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
            out=out,
            lse=lse,
        )
    return out


def cascade_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    num_shared_blocks: int,
) -> Tensor:
    """Decode sequences that begin with the same blocks, which are read once for all of them.

    All queries attend to the shared blocks together, and each one separately to its own blocks;
    the two results are merged (Ye et al., 2025, section 3.2.1, "composable formats").

    Args:
        q: [num_seqs, num_heads, head_dim], one query for each sequence.
        kv_cache: as for :func:`paged_attention`.
        block_table: [num_seqs, max_blocks] int32, the first `num_shared_blocks` equal in all rows.
        seq_lens: [num_seqs] int32, each longer than the shared blocks.
        params: without a window or ALiBi.
        num_shared_blocks: number of shared blocks, at least 1.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_q(q)
    check_cache(q, kv_cache, block_table, len(q))
    check_tensor("seq_lens", seq_lens, (len(q),), torch.int32, like=q)
    check(params.window is None, "window", "does not go with shared blocks")
    check(params.alibi_slopes is None, "alibi_slopes", "does not go with shared blocks")
    in_range = 1 <= num_shared_blocks < block_table.shape[1]
    check(in_range, "num_shared_blocks", f"must be from 1 to the table, got {num_shared_blocks}")
    num_shared = num_shared_blocks * kv_cache.shape[3]
    shared_lse, own_lse = (
        torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2)
    )
    shared_lens = torch.full((1,), num_shared, dtype=torch.int32, device=q.device)
    shared = paged_decode(
        q, kv_cache, block_table[:1], shared_lens, params.without_sinks(), lse=shared_lse
    )
    own_table = block_table[:, num_shared_blocks:].contiguous()
    own = paged_decode(q, kv_cache, own_table, seq_lens - num_shared, params, lse=own_lse)
    return merge_attention(shared, shared_lse, own, own_lse, out=own)
