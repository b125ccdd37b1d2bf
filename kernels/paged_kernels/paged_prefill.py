"""Causal attention of prefill chunks over block tables, with many queries per program.

The queries of a program, each with all heads that share a KV head, fill a tile large enough for
the tensor cores' widest instructions. Keys that all queries of the tile see need no mask. If there
are too few tiles to keep the device busy, their keys are split among programs, as `splits`
explains: a short prompt after a long prefix would otherwise run on a few multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._softmax import LN2, LOG2E, LOWEST, VALUE_FACTOR, attend_tiles
from paged_kernels.attention_params import AttentionParams
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import Device, device_of
from paged_kernels.errors import check, check_tensor
from paged_kernels.paged_decode import check_cache, check_out, check_q
from paged_kernels.splits import (
    SplitPlan,
    SplitShape,
    is_last,
    merge_splits,
    splits_at_once,
    store_result,
)
from paged_kernels.tuning.prefill import PrefillConfig, prefill_config
from paged_kernels.windows import Window, WindowConstants, first_visible

_MERGED_AT_ONCE = 8192  # elements of splits; more would be spilled


@dataclass(frozen=True, slots=True)
class _PrefillShape:
    """Everything that determines a launch except the lengths."""

    num_tiles: int  # upper bound of the number of tiles of queries
    num_kv_heads: int
    dim_padded: int
    rows: int  # rows of a tile: queries times heads of a group
    queries: int  # queries of a tile
    config: PrefillConfig
    device: Device

    @classmethod
    def of(cls, q: Tensor, kv_cache: Tensor, num_seqs: int, first_seq: int) -> _PrefillShape:
        num_heads, head_dim = q.shape[1:]
        num_kv_heads = kv_cache.shape[2]
        group, dim_padded = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
        device = device_of("q", q)
        config = prefill_config(device.arch, dim_padded, q.element_size())
        rows = max(config.rows, triton.next_power_of_2(group))
        queries = rows // group
        # One extra tile per sequence, because its last tile may be partly empty.
        num_tiles = (len(q) - first_seq) // queries + num_seqs - first_seq
        return cls(num_tiles, num_kv_heads, dim_padded, rows, queries, config, device)

    def splits(self, window: Window | None) -> SplitShape | None:
        """Return what determines the plan of the splits; None if the keys are not split.

        With a window there are too few keys.
        """
        splits = SplitShape(
            num_items=self.num_tiles,
            programs_per_split=self.num_kv_heads,
            programs_per_wave=self.device.num_sms,
            tile=self.config.tile,
            window=None,
            costs=self.config.costs,
        )
        fills_wave = self.num_tiles > splits.splits_per_wave
        return None if fills_wave or window is not None else splits


def plan_prefill(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    first_seq: int = 0,
    window: Window | None = None,
) -> SplitPlan | None:
    """Plan the splits of prompts for :func:`paged_prefill`, without reading a length on the host.

    Args:
        q: as for `paged_prefill`; only its shape and dtype matter.
        kv_cache: as for `paged_prefill`; only its shape and dtype matter.
        seq_lens: as for `paged_prefill`.
        query_start_loc: as for `paged_prefill`.
        first_seq: as for `paged_prefill`.
        window: window of the layers that will use the plan.

    Returns:
        The plan, or None if the keys are not split.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    num_seqs = _check_prompts(q, seq_lens, query_start_loc, first_seq)
    shape = _PrefillShape.of(q, kv_cache, num_seqs, first_seq)
    splits = shape.splits(window)
    if splits is None or len(q) == first_seq:
        return None
    return plan_tiles(
        splits,
        seq_lens,
        query_start_loc,
        first_seq=first_seq,
        end_seq=num_seqs,
        queries=shape.queries,
    )


def plan_tiles(
    splits: SplitShape,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    first_seq: int,
    end_seq: int,
    queries: int,
) -> SplitPlan:
    """Plan the splits of the tiles of queries of some sequences.

    Args:
        splits: what determines the plan.
        seq_lens: [num_seqs] int32, number of keys of each sequence.
        query_start_loc: [num_seqs + 1] int32.
        first_seq: first sequence with tiles.
        end_seq: the one after the last sequence with tiles.
        queries: queries of a tile.
    """
    ends = torch.empty(splits.num_items, dtype=torch.int32, device=seq_lens.device)
    _ends_kernel[(splits.num_items,)](
        seq_lens, query_start_loc, ends, first_seq, end_seq, QUERIES=queries, num_warps=1
    )
    return splits.plan(ends)


def paged_prefill(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    first_seq: int = 0,
    plan: SplitPlan | None = None,
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
        plan: plan from :func:`plan_prefill` with the same shapes, lengths and window; made if None.
        out: like `q`, filled and returned.
        lse: [num_tokens, num_heads] float32, filled with the natural logarithms of the
            softmax denominators.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    num_seqs = _check_prompts(q, seq_lens, query_start_loc, first_seq)
    check_cache(q, kv_cache, block_table, num_seqs)
    params.check(q, kv_cache)
    out = check_out(q, out, lse)
    if len(q) == first_seq:
        return out
    shape = _PrefillShape.of(q, kv_cache, num_seqs, first_seq)
    splits = shape.splits(params.window)
    if splits is None:
        check(plan is None, "plan", "was made for another shape")
    else:
        prompts = seq_lens, query_start_loc
        plan = plan or plan_prefill(q, kv_cache, *prompts, first_seq=first_seq)
        assert plan is not None
        splits.check(plan)
    _launch(
        q,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        params,
        first_seq,
        plan,
        out,
        lse,
        shape,
    )
    return out


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    first_seq: int,
    plan: SplitPlan | None,
    out: Tensor,
    lse: Tensor | None,
    shape: _PrefillShape,
) -> None:
    num_heads, head_dim = q.shape[1:]
    parts: tuple[Tensor | None, ...] = (None,) * 6
    grid: tuple[int, ...] = (shape.num_tiles, shape.num_kv_heads)
    if plan is not None:
        num_rows = len(plan.splits) * shape.queries * num_heads
        partial = torch.empty(num_rows, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(num_rows, dtype=torch.float32, device=q.device)
        places = (plan.splits, plan.first_split, plan.num_splits, plan.arrivals)
        parts = (*places, partial, partial_lse)
        # As for decodes, programs that start together read neighboring heads.
        grid = (len(plan.splits) * shape.num_kv_heads, 1)
    _prefill_kernel[grid](
        q,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        *parts,
        out,
        lse,
        params.sinks,
        params.k_scale,
        params.v_scale,
        params.kv_scales,
        params.scale if params.softcap is not None else params.scale * LOG2E.value,
        params.softcap,
        first_seq,
        len(seq_lens),
        block_table.stride(0),
        HEADS=num_heads,
        KV_HEADS=shape.num_kv_heads,
        DIM=head_dim,
        DIM_PADDED=shape.dim_padded,
        BLOCK_SIZE=kv_cache.shape[3],
        BLOCK_STRIDE=kv_cache.stride(0),
        SCALES_STRIDE=None if params.kv_scales is None else params.kv_scales.stride(0),
        **WindowConstants.of(params.window)._asdict(),
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        OUT_STRIDE=out.stride(0),
        OUT_HEAD_STRIDE=out.stride(1),
        ROWS=shape.rows,
        MERGED_SPLITS=splits_at_once(shape.rows, shape.dim_padded, _MERGED_AT_ONCE),
        TILE=shape.config.tile,
        num_warps=shape.config.num_warps,
        num_stages=shape.config.num_stages,
        maxnreg=shape.config.max_registers,
        **dependent_launch(shape.device),
    )


def _check_prompts(q: Tensor, seq_lens: Tensor, query_start_loc: Tensor, first_seq: int) -> int:
    check_q(q)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, like=q)
    num_seqs = len(seq_lens)
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, like=q)
    in_range = 0 <= first_seq <= min(num_seqs, len(q))
    check(in_range, "first_seq", f"must be from 0 to the number of sequences, got {first_seq}")
    return num_seqs


@triton.jit
def find_tile(starts_ptr, block, first_seq, num_seqs, QUERIES: tl.constexpr):
    """Return the sequence and the first query of tile `block`.

    The tiles of sequence s start at start[s] // QUERIES + s, which leaves enough for each one.
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
    first_block = (tl.load(starts_ptr + low) - base) // QUERIES + low - first_seq
    return low, (block - first_block) * QUERIES


@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def _ends_kernel(seq_lens_ptr, starts_ptr, ends_ptr, first_seq, num_seqs, QUERIES: tl.constexpr):
    """One program: the number of keys that the queries of a tile see, 0 if it has no queries."""
    block = tl.program_id(0)
    seq, first_query = find_tile(starts_ptr, block, first_seq, num_seqs, QUERIES)
    num_queries = tl.load(starts_ptr + seq + 1) - tl.load(starts_ptr + seq)
    num_keys = tl.load(seq_lens_ptr + seq)
    end = tl.minimum(num_keys - num_queries + first_query + QUERIES, num_keys)
    tl.store(ends_ptr + block, tl.where(first_query < num_queries, end, 0))


@triton.jit
def _places(row, first_query, num_queries, kv_head, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Return the query and the head of each row of a tile, and whether they exist."""
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    return query, head, (row < QUERIES * GROUP) & (query < num_queries)


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "table_stride"])
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    starts_ptr,
    splits_ptr,
    first_ptr,
    count_ptr,
    arrivals_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
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
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    Q_HEAD_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: consecutive queries of a sequence, with the query heads of one KV head.

    With `splits_ptr`, which may be None, it attends to one split of their keys, and the last
    program of the same queries and heads merges them.
    """
    wait_for_launch_before(DEPENDENT)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    if splits_ptr is None:
        # The last queries of a prompt see the most keys, so they start first.
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        kv_head = tl.program_id(1)
    else:
        split = tl.program_id(0) // KV_HEADS
        kv_head = tl.program_id(0) % KV_HEADS
        block = tl.load(splits_ptr + split * 4)
        if block < 0:
            return
    seq, first_query = find_tile(starts_ptr, block, first_seq, num_seqs, QUERIES)
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    if first_query >= num_queries:
        return

    num_keys = tl.load(seq_lens_ptr + seq)
    context = num_keys - num_queries
    row = tl.arange(0, ROWS)
    query, head, real = _places(row, first_query, num_queries, kv_head, GROUP, QUERIES)
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
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)

    # Keys in [begin, whole) may lie before the window of some query, all queries see [whole, full),
    # and only some queries see [full, end).
    first_position = context + first_query
    end = tl.minimum(first_position + QUERIES, num_keys)
    full = (first_position + 1) // TILE * TILE
    table_ptr += seq.to(tl.int64) * table_stride
    whole = 0
    first_key = 0
    if splits_ptr is not None:
        whole = tl.load(splits_ptr + split * 4 + 1)
        end = tl.load(splits_ptr + split * 4 + 2)
        full = tl.minimum(tl.maximum(full, whole), end)
    if sinks_ptr is not None:
        # A sink is a key without a value; the first split counts it.
        if whole == 0:
            highest = tl.load(sinks_ptr + head, mask=real, other=0.0) * LOG2E
            total = tl.full([ROWS], 1.0, tl.float32)
    if WINDOW is not None:
        first_key = first_visible(first_position, WINDOW, CHUNKED)
        begin = first_key // TILE * TILE
        whole = tl.cdiv(first_visible(end - 1, WINDOW, CHUNKED), TILE) * TILE
        full = tl.maximum(full, begin)
        whole = tl.minimum(whole, full)
        highest, total, acc = attend_tiles(
            q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, begin, whole, first_key, num_keys,
            position, scale, softcap, highest, total, acc,
            KV_HEADS, DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, WINDOW, CHUNKED, TILE, True,
        )  # fmt: skip
    highest, total, acc = attend_tiles(
        q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, whole, full, first_key, num_keys,
        position, scale, softcap, highest, total, acc,
        KV_HEADS, DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, WINDOW, CHUNKED, TILE, False,
    )  # fmt: skip
    highest, total, acc = attend_tiles(
        q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, full, end, first_key, num_keys,
        position, scale, softcap, highest, total, acc,
        KV_HEADS, DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, WINDOW, CHUNKED, TILE, True,
    )  # fmt: skip

    FLOAT32: tl.constexpr = q.dtype == tl.float32 and DIM_PADDED <= 128
    if splits_ptr is not None and (kv_scales_ptr is not None or FLOAT32):
        # The compiler does not know that `whole` is never negative. So it computes the places again
        # after the loops, and they take no registers in the loops, where there are too few of them.
        row += tl.minimum(whole, 0)
        query, head, real = _places(row, first_query, num_queries, kv_head, GROUP, QUERIES)
        token = (start + query).to(tl.int64)
        kept = real[:, None] & (dims < DIM)[None, :]

    some = total > 0.0  # a query may see no key of a split, and padding sees none at all
    total = tl.where(some, total, 1.0)
    acc = acc / total[:, None]
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head)
    elif kv_scales_ptr is not None:
        acc *= 1 / VALUE_FACTOR
    lse = tl.where(some, (highest + tl.log2(total)) * LN2, float("-inf"))
    if splits_ptr is not None:
        if tl.load(splits_ptr + split * 4 + 3) == 0:
            at = (split.to(tl.int64) * QUERIES + row // GROUP) * HEADS + head
            tl.store(partial_ptr + (at * DIM)[:, None] + dims[None, :], acc, mask=kept)
            tl.store(partial_lse_ptr + at, lse, mask=real)
            count = tl.load(count_ptr + block)
            if not is_last(arrivals_ptr + block * KV_HEADS + kv_head, count):
                return
            first = tl.load(first_ptr + block)
            acc, lse = merge_splits(
                partial_ptr, partial_lse_ptr, first, count, QUERIES, row // GROUP, head, real,
                HEADS, DIM, DIM_PADDED, MERGED_SPLITS,
            )  # fmt: skip
            # Stored here: with one place for both results, registers would run out.
            store_result(
                out_ptr, lse_ptr, token, head, real, acc, lse,
                HEADS, DIM, OUT_STRIDE, OUT_HEAD_STRIDE,
            )  # fmt: skip
            return
    store_result(
        out_ptr, lse_ptr, token, head, real, acc, lse, HEADS, DIM, OUT_STRIDE, OUT_HEAD_STRIDE
    )
