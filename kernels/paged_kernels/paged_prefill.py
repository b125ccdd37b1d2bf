"""Causal attention of prefill chunks over block tables, with many queries per program.

The queries of a program, each with all heads that share a KV head, fill a tile large enough for
the tensor cores' widest instructions. Keys that all queries of the tile see need no mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._softmax import LN2, LOG2E, LOWEST, VALUE_FACTOR, attend_tiles
from paged_kernels.attention_params import AttentionParams
from paged_kernels.device import device_of
from paged_kernels.errors import check, check_tensor
from paged_kernels.paged_decode import check_cache, check_out, check_q
from paged_kernels.tuning import prefill_config


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    first_seq: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend from each query to the keys of its sequence up to its own position.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, each head contiguous; sequence
            `s` has rows `query_start_loc[s]` to `query_start_loc[s + 1]`, its last positions.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim] in the dtype of `q`, fp8
            or int8; already holds the keys of these queries.
        block_table: [num_seqs, max_blocks] int32; entries past a sequence's last block
            and before the window of its first query are ignored.
        seq_lens: [num_seqs] int32, number of keys of each sequence.
        query_start_loc: [num_seqs + 1] int32.
        params: options of the attention scores.
        first_seq: first sequence to process; those before it are skipped and have one query each.
        out: like `q`, filled and returned.
        lse: [num_tokens, num_heads] float32, filled with the natural logarithms of the
            softmax denominators.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_q(q)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, like=q)
    num_seqs = len(seq_lens)
    check_cache(q, kv_cache, block_table, num_seqs)
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, like=q)
    params.check(q, kv_cache)
    in_range = 0 <= first_seq <= min(num_seqs, len(q))
    check(in_range, "first_seq", f"must be from 0 to the number of sequences, got {first_seq}")
    out = check_out(q, out, lse)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group, dim_padded = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    config = prefill_config(device_of("q", q).arch, dim_padded, q.element_size())
    rows = max(config.rows, triton.next_power_of_2(group))
    # One extra program per sequence, because its last program may be partly empty.
    num_programs = (len(q) - first_seq) // (rows // group) + num_seqs - first_seq
    if len(q) == first_seq:
        return out
    _prefill_kernel[(num_programs, num_kv_heads)](
        q,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        params.sinks,
        params.alibi_slopes,
        params.k_scale,
        params.v_scale,
        params.kv_scales,
        params.scale if params.softcap is not None else params.scale * LOG2E.value,
        params.softcap,
        first_seq,
        num_seqs,
        block_table.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=head_dim,
        DIM_PADDED=dim_padded,
        BLOCK_SIZE=block_size,
        WINDOW=params.window,
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        OUT_STRIDE=out.stride(0),
        OUT_HEAD_STRIDE=out.stride(1),
        ROWS=rows,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@triton.jit
def _find(starts_ptr, block, first_seq, num_seqs, QUERIES: tl.constexpr):
    """Return the sequence that program `block` works on, and the number of its first program.

    The programs of sequence s start at start[s] // QUERIES + s, which leaves enough for each one.
    """
    base = tl.load(starts_ptr + first_seq)
    low = first_seq
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(starts_ptr + middle) - base) // QUERIES + middle - first_seq
        if begins <= block:
            low = middle
        else:
            high = middle
    return low, (tl.load(starts_ptr + low) - base) // QUERIES + low - first_seq


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride"])
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    kv_scales_ptr,
    scale,
    softcap,
    first_seq,
    num_seqs,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: consecutive queries of a sequence, with the query heads of one KV head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    # The last queries of a prompt see the most keys, so they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, first_block = _find(starts_ptr, block, first_seq, num_seqs, QUERIES)
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    first_query = (block - first_block) * QUERIES
    if first_query >= num_queries:
        return

    num_keys = tl.load(seq_lens_ptr + seq)
    context = num_keys - num_queries
    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < QUERIES * GROUP) & (query < num_queries)
    position = context + query
    token = (start + query).to(tl.int64)
    dims = tl.arange(0, DIM_PADDED)
    kept = real[:, None] & (dims < DIM)[None, :]
    q = tl.load(
        q_ptr + (token * Q_STRIDE + head * Q_HEAD_STRIDE)[:, None] + dims[None, :],
        mask=kept,
        other=0.0,
    )
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=real, other=0.0)
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:  # a sink is a key without a value
        highest = tl.load(sinks_ptr + head, mask=real, other=0.0) * LOG2E
        total = tl.full([ROWS], 1.0, tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)

    # Keys in [begin, whole) may lie before the window of some query, all queries see [whole, full),
    # and only some queries see [full, end).
    first_position = context + first_query
    end = tl.minimum(first_position + QUERIES, num_keys)
    full = (first_position + 1) // TILE * TILE
    table_ptr += seq.to(tl.int64) * table_stride
    whole = 0
    first_key = 0
    if WINDOW is not None:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
        begin = first_key // TILE * TILE
        whole = tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE
        full = tl.maximum(full, begin)
        whole = tl.minimum(whole, full)
        highest, total, acc = attend_tiles(
            q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, begin, whole, first_key, num_keys,
            position, scale, softcap, slopes, highest, total, acc,
            KV_HEADS, DIM, BLOCK_SIZE, WINDOW, TILE, True,
        )  # fmt: skip
    highest, total, acc = attend_tiles(
        q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, whole, full, first_key, num_keys,
        position, scale, softcap, slopes, highest, total, acc,
        KV_HEADS, DIM, BLOCK_SIZE, WINDOW, TILE, False,
    )  # fmt: skip
    highest, total, acc = attend_tiles(
        q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, full, end, first_key, num_keys,
        position, scale, softcap, slopes, highest, total, acc,
        KV_HEADS, DIM, BLOCK_SIZE, WINDOW, TILE, True,
    )  # fmt: skip

    acc = acc / tl.where(real, total, 1.0)[:, None]
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head)
    elif kv_scales_ptr is not None:
        acc *= 1 / VALUE_FACTOR
    at = token * OUT_STRIDE + head * OUT_HEAD_STRIDE
    tl.store(out_ptr + at[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=kept)
    if lse_ptr is not None:
        lse = (highest + tl.log2(tl.where(real, total, 1.0))) * LN2
        tl.store(lse_ptr + token * HEADS + head, lse, mask=real)
