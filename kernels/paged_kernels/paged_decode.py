"""Attention of few queries over long caches: keys are split among programs, then merged.

FlashDecoding (Dao et al., 2023), with splits that are planned on the device once per step, as
`splits` explains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._softmax import LN2, LOG2E, LOWEST, VALUE_FACTOR, attend_tiles
from paged_kernels.attention_params import MAX_HEAD_DIM, AttentionParams
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import Device, device_of
from paged_kernels.dtypes import MODEL_DTYPES, QUANTIZED_DTYPES, check_float8
from paged_kernels.errors import check, check_blocks, check_tensor
from paged_kernels.splits import (
    SplitPlan,
    SplitShape,
    is_last,
    merge_splits,
    splits_at_once,
    store_result,
)
from paged_kernels.tuning.decode import FEW_PROGRAMS, DecodeConfig, decode_config
from paged_kernels.windows import Chunks, Window, WindowConstants, first_visible

MAX_ROWS = 128  # queries times heads of a group that share one pass over the keys


@dataclass(frozen=True, slots=True)
class _DecodeShape:
    """Everything that determines a launch except the lengths."""

    num_seqs: int
    num_queries: int  # per sequence
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int  # rows of a program's query tile, a power of 2
    config: DecodeConfig
    device: Device

    @classmethod
    def of(cls, q: Tensor, kv_cache: Tensor, num_seqs: int, *, large: bool) -> _DecodeShape:
        device = device_of("q", q)
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = kv_cache.shape[2]
        num_queries = num_tokens // num_seqs if num_seqs else 1
        group = num_heads // num_kv_heads
        most = max_rows(head_dim)
        if device.arch < 90 and head_dim <= 256:
            most //= 2  # limited by registers
        rows = max(16, triton.next_power_of_2(max(group, min(most, num_queries * group))))
        config = decode_config(
            device.arch,
            triton.next_power_of_2(head_dim),
            q.element_size(),
            rows,
            quantized=kv_cache.dtype != q.dtype,
            few=num_seqs * num_kv_heads <= FEW_PROGRAMS,
            large=large,
        )
        return cls(num_seqs, num_queries, num_heads, num_kv_heads, head_dim, rows, config, device)

    @property
    def queries_at_once(self) -> int:
        return self.rows * self.num_kv_heads // self.num_heads

    @property
    def merged_rows(self) -> int:
        """The rows of a query tile that are merged: without its padding if there is one query."""
        group = self.num_heads // self.num_kv_heads
        return self.rows if self.num_queries > 1 else triton.next_power_of_2(group)

    @property
    def splits_merged_at_once(self) -> int:
        elements = 4096 if self.config.max_registers <= 128 else 8192  # more would be spilled
        dim_padded = triton.next_power_of_2(self.head_dim)
        return splits_at_once(self.merged_rows, dim_padded, elements)

    def splits(self, window: Window | None) -> SplitShape:
        """Return what determines the plan of the splits."""
        return SplitShape(
            num_items=self.num_seqs,
            programs_per_split=self.num_kv_heads * -(-self.num_queries // self.queries_at_once),
            programs_per_wave=self.device.num_sms * self.config.programs_per_sm,
            tile=self.config.tile,
            window=window,
            costs=self.config.costs,
        )


def plan_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    *,
    window: Window | None = None,
    has_lse: bool = False,
) -> SplitPlan:
    """Plan the splits of a batch for :func:`paged_decode`, without reading a length on the host.

    Args:
        q: as for `paged_decode`; only its shape and dtype matter.
        kv_cache: as for `paged_decode`; only its shape and dtype matter.
        seq_lens: [num_seqs] int32; 0 for padding.
        window: window of the layers that will use the plan.
        has_lse: whether the calls will have an `lse` to fill. The plan fits both kinds of calls.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    num_seqs = _check_queries(q, seq_lens)
    large = has_lse or isinstance(window, Chunks)
    return _DecodeShape.of(q, kv_cache, num_seqs, large=large).splits(window).plan(seq_lens)


def paged_decode(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    plan: SplitPlan | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend from each sequence's queries to all its keys.

    Args:
        q: [num_seqs * num_queries, num_heads, head_dim] bf16, fp16 or fp32, each head
            contiguous. With several queries per sequence, each one sees all keys, as for a prefix
            that sequences share; such calls accept no window.
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim] in the dtype of `q`, fp8
            or int8 (with scales in `params`).
        block_table: [num_seqs, max_blocks] int32; entries past a sequence's last block
            and before its window are ignored.
        seq_lens: [num_seqs] int32, number of keys of each sequence; 0 yields zeros and a
            log-sum-exp of minus infinity.
        params: options of the attention scores.
        plan: plan from :func:`plan_decode` with the same shapes, lengths and window; made if None.
        out: like `q`, filled and returned.
        lse: [num_seqs * num_queries, num_heads] float32, filled with the natural logarithms of
            the softmax denominators, for :func:`paged_kernels.merge_attention`.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    num_seqs = _check_queries(q, seq_lens)
    check_cache(q, kv_cache, block_table, num_seqs)
    params.check(q, kv_cache)
    out = check_out(q, out, lse)
    has_lse = lse is not None
    large = has_lse or isinstance(params.window, Chunks)
    shape = _DecodeShape.of(q, kv_cache, num_seqs, large=large)
    if shape.num_queries > 1:
        check(params.window is None, "window", "does not go with several queries of a sequence")
    if plan is None:
        plan = plan_decode(q, kv_cache, seq_lens, window=params.window, has_lse=has_lse)
    shape.splits(params.window).check(plan)
    if num_seqs:
        _launch(q, kv_cache, block_table, seq_lens, params, plan, out, lse, shape)
    return out


def _launch(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    plan: SplitPlan,
    out: Tensor,
    lse: Tensor | None,
    shape: _DecodeShape,
) -> None:
    max_splits, num_rows = len(plan.splits), shape.num_queries * shape.num_heads
    partial = torch.empty(
        max_splits * num_rows, shape.head_dim, dtype=torch.float32, device=q.device
    )
    partial_lse = torch.empty(max_splits * num_rows, dtype=torch.float32, device=q.device)
    query_blocks = triton.cdiv(shape.num_queries, shape.queries_at_once)
    # Heads vary fastest: programs that start together read neighboring heads of the same blocks,
    # and the real splits, which come first in the plan, start before the empty ones.
    _split_kernel[(max_splits * shape.num_kv_heads, query_blocks)](
        q,
        kv_cache,
        block_table,
        seq_lens,
        plan.splits,
        plan.first_split,
        plan.num_splits,
        plan.arrivals,
        out,
        lse,
        partial,
        partial_lse,
        params.sinks,
        params.k_scale,
        params.v_scale,
        params.kv_scales,
        params.scale if params.softcap is not None else params.scale * LOG2E.value,
        params.softcap,
        shape.num_seqs,
        shape.num_queries,
        block_table.stride(0),
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        DIM=shape.head_dim,
        DIM_PADDED=triton.next_power_of_2(shape.head_dim),
        BLOCK_SIZE=kv_cache.shape[3],
        BLOCK_STRIDE=kv_cache.stride(0),
        SCALES_STRIDE=None if params.kv_scales is None else params.kv_scales.stride(0),
        **WindowConstants.of(params.window)._asdict(),
        Q_STRIDE=q.stride(0),
        Q_HEAD_STRIDE=q.stride(1),
        OUT_STRIDE=out.stride(0),
        OUT_HEAD_STRIDE=out.stride(1),
        ROWS=shape.rows,
        MERGED_ROWS=shape.merged_rows,
        MERGED_SPLITS=shape.splits_merged_at_once,
        TILE=plan.tile,
        num_warps=shape.config.num_warps,
        num_stages=shape.config.num_stages,
        maxnreg=shape.config.max_registers,
        **dependent_launch(shape.device),
    )


@triton.jit
def _places(row, num_queries, kv_head, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the query and the head of each row of a tile, and whether they exist."""
    query = tl.program_id(1) * (ROWS // GROUP) + row // GROUP
    head = kv_head * GROUP + row % GROUP
    return query, head, (row < ROWS // GROUP * GROUP) & (query < num_queries)


@triton.jit(do_not_specialize=["num_seqs", "num_queries", "table_stride"])
def _split_kernel(
    q_ptr,
    cache_ptr,
    table_ptr,
    seq_lens_ptr,
    splits_ptr,
    first_ptr,
    count_ptr,
    arrivals_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    kv_scales_ptr,
    scale,
    softcap,
    num_seqs,
    num_queries,
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
    MERGED_ROWS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one split of a sequence's keys, for a tile of queries of one KV head.

    The last one to arrive of the programs with the same sequence, KV head and tile merges the
    splits. No split belongs to an empty sequence `s`, so the programs of split `s` zero its output.
    """
    wait_for_launch_before(DEPENDENT)
    split = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    query, head, real = _places(row, num_queries, kv_head, GROUP, ROWS)
    dims = tl.arange(0, DIM_PADDED)
    if split < num_seqs:
        if tl.load(seq_lens_ptr + split) == 0:
            store_result(
                out_ptr, lse_ptr, (split * num_queries + query).to(tl.int64), head, real,
                tl.zeros([ROWS, DIM_PADDED], tl.float32),
                tl.full([ROWS], float("-inf"), tl.float32), HEADS, DIM, OUT_STRIDE, OUT_HEAD_STRIDE,
            )  # fmt: skip
    seq = tl.load(splits_ptr + split * 4)
    if seq < 0:
        return
    begin = tl.load(splits_ptr + split * 4 + 1)
    end = tl.load(splits_ptr + split * 4 + 2)
    alone = tl.load(splits_ptr + split * 4 + 3)

    token = (seq * num_queries + query).to(tl.int64)
    kept = real[:, None] & (dims < DIM)[None, :]
    q = tl.load(
        q_ptr + (token * Q_STRIDE + head * Q_HEAD_STRIDE)[:, None] + dims[None, :],
        mask=kept,
        other=0.0,
    )
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head)
    num_keys = tl.load(seq_lens_ptr + seq)
    first_key = 0
    if WINDOW is not None:
        first_key = first_visible(num_keys - 1, WINDOW, CHUNKED)

    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        # A sink is a key without a value; the sequence's first split counts it.
        if begin <= first_key:
            highest = tl.load(sinks_ptr + head, mask=real, other=0.0) * LOG2E
            total = tl.full([ROWS], 1.0, tl.float32)
    acc = tl.zeros([ROWS, DIM_PADDED], tl.float32)

    # All queries see all keys, so only tiles cut by the end of the split or the window need a mask.
    position = tl.zeros([ROWS], tl.int32) + (num_keys - 1)
    full = begin + (end - begin) // TILE * TILE
    table_ptr += seq.to(tl.int64) * table_stride
    whole = begin
    if WINDOW is not None:
        whole = tl.minimum(tl.maximum(begin, tl.cdiv(first_key, TILE) * TILE), full)
        highest, total, acc = attend_tiles(
            q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, begin, whole, first_key, end, position,
            scale, softcap, highest, total, acc,
            KV_HEADS, DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, WINDOW, CHUNKED, TILE, True,
        )  # fmt: skip
    highest, total, acc = attend_tiles(
        q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, whole, full, first_key, end, position,
        scale, softcap, highest, total, acc,
        KV_HEADS, DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, WINDOW, CHUNKED, TILE, False,
    )  # fmt: skip
    highest, total, acc = attend_tiles(
        q, cache_ptr, kv_scales_ptr, table_ptr, kv_head, full, end, first_key, end, position,
        scale, softcap, highest, total, acc,
        KV_HEADS, DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, WINDOW, CHUNKED, TILE, True,
    )  # fmt: skip

    if sinks_ptr is not None:
        # As in `paged_prefill`: `begin` is never negative.
        row += tl.minimum(begin, 0)
        query, head, real = _places(row, num_queries, kv_head, GROUP, ROWS)
        token = (seq * num_queries + query).to(tl.int64)
        kept = real[:, None] & (dims < DIM)[None, :]
    acc = acc / total[:, None]
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head)
    elif kv_scales_ptr is not None:
        acc *= 1 / VALUE_FACTOR
    lse = (highest + tl.log2(total)) * LN2
    if alone != 0:
        store_result(
            out_ptr, lse_ptr, token, head, real, acc, lse,
            HEADS, DIM, OUT_STRIDE, OUT_HEAD_STRIDE,
        )  # fmt: skip
        return

    at = (split.to(tl.int64) * num_queries + query) * HEADS + head
    tl.store(partial_ptr + (at * DIM)[:, None] + dims[None, :], acc, mask=kept)
    tl.store(partial_lse_ptr + at, lse, mask=real)
    count = tl.load(count_ptr + seq)
    tile = (seq * tl.num_programs(1) + tl.program_id(1)) * KV_HEADS + kv_head
    if not is_last(arrivals_ptr + tile, count):
        return
    row = tl.arange(0, MERGED_ROWS)
    query, head, real = _places(row, num_queries, kv_head, GROUP, ROWS)
    acc, lse = merge_splits(
        partial_ptr, partial_lse_ptr, tl.load(first_ptr + seq), count, num_queries,
        query, head, real, HEADS, DIM, DIM_PADDED, MERGED_SPLITS,
    )  # fmt: skip
    store_result(
        out_ptr, lse_ptr, (seq * num_queries + query).to(tl.int64), head, real, acc, lse,
        HEADS, DIM, OUT_STRIDE, OUT_HEAD_STRIDE,
    )  # fmt: skip


def max_rows(head_dim: int) -> int:
    """Return the most queries times heads of a group that share one pass over the keys.

    A row of more than 256 numbers takes more registers.
    """
    return MAX_ROWS if head_dim <= 256 else MAX_ROWS // 4


def check_cache(q: Tensor, kv_cache: Tensor, block_table: Tensor, num_seqs: int) -> None:
    """Check a cache and its block table against queries that are already checked.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    num_heads, head_dim = q.shape[1:]
    dtypes = (q.dtype, *QUANTIZED_DTYPES)
    check_blocks("kv_cache", kv_cache, (None, 2, None, None, head_dim), dtypes, like=q)
    num_kv_heads, block_size = kv_cache.shape[2:4]
    powers = block_size & (block_size - 1) == 0 and 8 <= block_size <= 256
    check(powers, "kv_cache", f"must have blocks of 8, 16, ... 256 tokens, got {block_size}")
    divides = num_kv_heads > 0 and num_heads % num_kv_heads == 0
    check(divides, "kv_cache", f"has {num_kv_heads} heads for {num_heads} of the queries")
    most = max_rows(head_dim)
    few = num_heads // num_kv_heads <= most
    check(few, "q", f"must have at most {most} heads to one of the cache, got {num_heads}")
    check_float8("kv_cache", kv_cache.dtype, device_of("q", q).arch)
    check_tensor("block_table", block_table, (num_seqs, None), torch.int32, like=q)


def check_out(q: Tensor, out: Tensor | None, lse: Tensor | None) -> Tensor:
    """Return the output tensor: the caller's, after checking it, or a new one. Check `lse` too.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    if lse is not None:
        check_tensor("lse", lse, tuple(q.shape[:2]), torch.float32, like=q)
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check_tensor("out", out, tuple(q.shape), q.dtype, like=q, contiguous=False)
    return out


def check_q(q: Tensor, name: str = "q") -> None:
    """Check queries, or a tensor of the same layout: [tokens, num_heads, head_dim].

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_tensor(name, q, (None, None, None), MODEL_DTYPES, like=q, contiguous=False)
    device_of(name, q)
    dim = q.shape[2]
    in_range = 16 <= dim <= MAX_HEAD_DIM and dim % 8 == 0
    check(in_range, name, f"must have heads of 16 to {MAX_HEAD_DIM}, got {dim}")


def _check_queries(q: Tensor, seq_lens: Tensor) -> int:
    check_q(q)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, like=q)
    num_seqs = len(seq_lens)
    even = len(q) == num_seqs or (num_seqs > 0 and len(q) % num_seqs == 0)
    check(even, "q", f"has {len(q)} tokens for {num_seqs} sequences")
    return num_seqs
