"""Latent attention over block tables: all heads of a sequence attend to the same cached rows.

A row has the latent vector of a token, which is key and value, and its rotary key. DeepSeek-AI,
"DeepSeek-V2" (2024), section 2.1. A program attends with a tile of queries and heads, and loads
each row once for the scores and for the sums. The keys of few queries are split among programs, as
`splits` explains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._softmax import LN2, LOG2E, LOWEST
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import Device, device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.paged_prefill import find_tile, plan_tiles
from paged_kernels.splits import (
    SplitPlan,
    SplitShape,
    is_last,
    merge_splits,
    splits_at_once,
    store_result,
)
from paged_kernels.tuning.latent import LatentConfig, latent_config

MAX_RANK, MAX_ROTARY = 512, 256
_PROMPT_ROWS = 64  # queries times heads of a program, at most
# A step with at most as many queries times heads is divided among programs of 16 rows.
_FEW_ROWS = 256
_MERGED_AT_ONCE = 32768  # elements of splits; more would be spilled
_MERGED_TILE = 8192  # elements of a split among them


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The splits of a step's keys, made once for all layers of a shape.

    Attributes:
        decodes: those of sequences with one query; None if there are none.
        prompts: those of other sequences; None if there are none, or their keys are not split.
    """

    decodes: SplitPlan | None
    prompts: SplitPlan | None


@dataclass(frozen=True, slots=True)
class _Part:
    """The sequences of a launch, decodes or prompts, and everything that determines the launch."""

    first_seq: int
    end_seq: int
    num_tiles: int  # upper bound of the number of tiles of queries
    heads: int  # heads of a program
    head_blocks: int  # programs for all heads
    queries: int  # queries of a tile
    config: LatentConfig
    device: Device
    is_decode: bool

    @property
    def splits(self) -> SplitShape | None:
        """What determines the plan of the splits; None if the keys are not split."""
        splits = SplitShape(
            num_items=self.num_tiles,
            programs_per_split=self.head_blocks,
            programs_per_wave=self.device.num_sms,
            tile=self.config.tile,
            window=None,
            costs=self.config.costs,
        )
        fills_wave = self.num_tiles > splits.splits_per_wave
        return None if fills_wave and not self.is_decode else splits


def _parts(q: Tensor, rank: int, num_seqs: int, num_decodes: int) -> list[_Part]:
    """Return the launches of a step: one for the decodes, and one for the prompts."""
    device, num_heads = device_of("q", q), q.shape[1]
    parts = []
    for is_decode in (True, False):
        first, end = (0, num_decodes) if is_decode else (num_decodes, num_seqs)
        num_tokens = num_decodes if is_decode else len(q) - num_decodes
        if not num_tokens:
            continue
        heads = triton.next_power_of_2(num_heads)
        rows = heads if is_decode else _PROMPT_ROWS
        if is_decode and num_tokens * heads <= _FEW_ROWS:
            rows = 16
        width = triton.next_power_of_2(rank) + triton.next_power_of_2(q.shape[2] - rank)
        config = latent_config(device.arch, width, q.element_size(), rows)
        heads = min(heads, config.rows)
        queries = 1 if is_decode else config.rows // heads
        # One extra tile per sequence, because its last tile may be partly empty.
        num_tiles = num_tokens if is_decode else num_tokens // queries + end - first
        blocks = -(-num_heads // heads)
        sizes = num_tiles, heads, blocks, queries
        parts.append(_Part(first, end, *sizes, config, device, is_decode))
    return parts


def plan_latent(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    rank: int,
    num_decodes: int = 0,
) -> LatentPlan:
    """Plan the splits of a step for `latent_attention`, without reading a length on the host.

    Args:
        q: as for `latent_attention`; only its shape and dtype matter.
        cache: as for `latent_attention`; only its shape matters.
        seq_lens: as for `latent_attention`.
        query_start_loc: as for `latent_attention`.
        rank: as for `latent_attention`.
        num_decodes: as for `latent_attention`.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    num_seqs = _check(q, cache, seq_lens, query_start_loc, rank, num_decodes)
    plans: dict[bool, SplitPlan] = {}
    for part in _parts(q, rank, num_seqs, num_decodes):
        if part.splits is None:
            continue
        if part.is_decode:
            plans[True] = part.splits.plan(seq_lens[:num_decodes])
        else:
            plans[False] = plan_tiles(
                part.splits,
                seq_lens,
                query_start_loc,
                first_seq=part.first_seq,
                end_seq=part.end_seq,
                queries=part.queries,
            )
    return LatentPlan(plans.get(True), plans.get(False))


def latent_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    rank: int,
    scale: float,
    num_decodes: int = 0,
    plan: LatentPlan | None = None,
) -> Tensor:
    """Attend from each query to the rows of its sequence up to its position.

    Args:
        q: [num_tokens, num_heads, row_size] bf16, fp16 or fp32; sequence `s` has the tokens
            `query_start_loc[s]` to `query_start_loc[s + 1]`, its last positions.
        cache: [num_blocks, block_size, row_size] in the dtype of `q`; already holds the rows of
            these tokens. A row has `rank` numbers of the latent vector, then the rotary key.
        block_table: [num_seqs, max_blocks] int32; entries past a sequence's last block are ignored.
        seq_lens: [num_seqs] int32, number of rows of each sequence; 0 for padding.
        query_start_loc: [num_seqs + 1] int32.
        rank: size of the latent vector.
        scale: factor on the scores.
        num_decodes: number of leading sequences that have one query each.
        plan: plan from `plan_latent` with the same shapes and lengths; made if None.

    Returns:
        [num_tokens, num_heads, rank] in the dtype of `q`: the sums of latent vectors. They are 0
        for a sequence without rows.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    num_seqs = _check(q, cache, seq_lens, query_start_loc, rank, num_decodes)
    check_tensor("block_table", block_table, (num_seqs, None), torch.int32, like=q)
    if plan is None:
        lengths = seq_lens, query_start_loc
        plan = plan_latent(q, cache, *lengths, rank=rank, num_decodes=num_decodes)
    out = torch.zeros(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    for part in _parts(q, rank, num_seqs, num_decodes):
        splits = plan.decodes if part.is_decode else plan.prompts
        if part.splits is None or splits is None:
            check(splits is None and part.splits is None, "plan", "was made for another shape")
        else:
            part.splits.check(splits)
        _launch(q, cache, block_table, seq_lens, query_start_loc, scale, splits, out, part)
    return out


def _launch(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    plan: SplitPlan | None,
    out: Tensor,
    part: _Part,
) -> None:
    (num_heads, row_size), rank = q.shape[1:], out.shape[2]
    parts: tuple[Tensor | None, ...] = (None,) * 6
    grid = part.num_tiles * part.head_blocks
    if plan is not None:
        num_rows = len(plan.splits) * part.queries * num_heads
        partial = torch.empty(num_rows, rank, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(num_rows, dtype=torch.float32, device=q.device)
        places = (plan.splits, plan.first_split, plan.num_splits, plan.arrivals)
        parts = (*places, partial, partial_lse)
        grid = len(plan.splits) * part.head_blocks
    rank_padded = max(16, triton.next_power_of_2(rank))
    rows = max(16, part.heads * part.queries)
    merged_dims = min(rank_padded, _MERGED_TILE // rows)
    _latent_kernel[(grid,)](
        q,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        *parts,
        out,
        scale * LOG2E.value,
        part.first_seq,
        part.end_seq,
        block_table.stride(0),
        HEADS=num_heads,
        GROUP=part.heads,
        QUERIES=part.queries,
        DECODES=part.is_decode,
        RANK=rank,
        RANK_PADDED=rank_padded,
        ROTARY=row_size - rank,
        ROTARY_PADDED=max(16, triton.next_power_of_2(row_size - rank)),
        BLOCK_SIZE=cache.shape[1],
        ROWS=rows,
        MERGED_DIMS=merged_dims,
        MERGED_SPLITS=splits_at_once(rows, merged_dims, _MERGED_AT_ONCE),
        TILE=part.config.tile,
        num_warps=part.config.num_warps,
        num_stages=part.config.num_stages,
        maxnreg=255,  # left alone, the assembler spills to fit a second program
        **dependent_launch(part.device),
    )


@triton.jit(do_not_specialize=["first_seq", "end_seq", "table_stride"])
def _latent_kernel(
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
    scale,
    first_seq,
    end_seq,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    DECODES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED_DIMS: tl.constexpr,
    MERGED_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: consecutive queries of a sequence, with `GROUP` of the heads.

    With `splits_ptr`, which may be None, it attends to one split of their keys, and the last
    program of the same queries and heads merges them.
    """
    wait_for_launch_before(DEPENDENT)
    BLOCKS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    ROW: tl.constexpr = RANK + ROTARY
    # Heads vary fastest: programs that start together read the same rows.
    head_block = tl.program_id(0) % BLOCKS
    split = tl.program_id(0) // BLOCKS
    if splits_ptr is None:
        # The last queries of a prompt see the most keys, so they start first.
        block = tl.num_programs(0) // BLOCKS - 1 - split
    else:
        block = tl.load(splits_ptr + split * 4)
        if block < 0:
            return
    if DECODES:
        seq = block
        first_query = 0
    else:
        seq, first_query = find_tile(starts_ptr, block, first_seq, end_seq, QUERIES)
    start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - start
    num_keys = tl.load(seq_lens_ptr + seq)
    if first_query >= num_queries or num_keys == 0:
        return

    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = head_block * GROUP + row % GROUP
    real = (row < QUERIES * GROUP) & (query < num_queries) & (head < HEADS)
    first_position = num_keys - num_queries + first_query
    position = num_keys - num_queries + query
    token = (start + query).to(tl.int64)
    dims = tl.arange(0, RANK_PADDED)
    turning = tl.arange(0, ROTARY_PADDED)
    q_row = q_ptr + (token * HEADS + head)[:, None] * ROW
    kept = real[:, None] & (dims < RANK)[None, :]
    q = tl.load(q_row + dims[None, :], mask=kept, other=0.0)
    q_rotary = tl.load(
        q_row + RANK + turning[None, :], mask=real[:, None] & (turning < ROTARY)[None, :], other=0.0
    )

    first_key, end = 0, tl.minimum(first_position + QUERIES, num_keys)
    if splits_ptr is not None:
        first_key = tl.load(splits_ptr + split * 4 + 1)
        end = tl.load(splits_ptr + split * 4 + 2)
    table_ptr += seq.to(tl.int64) * table_stride
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_PADDED], tl.float32)
    highest, total, acc = _attend_rows(
        q, q_rotary, cache_ptr, table_ptr, first_key, end, num_keys, position, scale,
        highest, total, acc, RANK, ROTARY, BLOCK_SIZE, TILE,
    )  # fmt: skip

    some = total > 0.0  # a query may see no key of a split
    total = tl.where(some, total, 1.0)
    acc = acc / total[:, None]
    lse = tl.where(some, (highest + tl.log2(total)) * LN2, float("-inf"))
    if splits_ptr is not None:
        if tl.load(splits_ptr + split * 4 + 3) == 0:
            at = (split.to(tl.int64) * QUERIES + row // GROUP) * HEADS + head
            tl.store(partial_ptr + (at * RANK)[:, None] + dims[None, :], acc, mask=kept)
            tl.store(partial_lse_ptr + at, lse, mask=real)
            count = tl.load(count_ptr + block)
            if not is_last(arrivals_ptr + block * BLOCKS + head_block, count):
                return
            first = tl.load(first_ptr + block)
            for first_dim in range(0, RANK_PADDED, MERGED_DIMS):
                some_of_acc, lse = merge_splits(
                    partial_ptr, partial_lse_ptr, first, count, QUERIES,
                    row // GROUP, head, real, HEADS, RANK, MERGED_DIMS, MERGED_SPLITS, first_dim,
                )  # fmt: skip
                store_result(
                    out_ptr, None, token, head, real, some_of_acc, lse,
                    HEADS, RANK, HEADS * RANK, RANK, first_dim,
                )  # fmt: skip
            return
    store_result(out_ptr, None, token, head, real, acc, lse, HEADS, RANK, HEADS * RANK, RANK)


@triton.jit
def _load_columns(row_ptr, columns, COLUMNS: tl.constexpr):
    """Load columns of rows; those from `COLUMNS` on are 0."""
    if columns.shape[0] == COLUMNS:  # a mask takes registers
        return tl.load(row_ptr + columns[None, :])
    return tl.load(row_ptr + columns[None, :], mask=(columns < COLUMNS)[None, :], other=0.0)


@triton.jit
def _attend_rows(
    q,
    q_rotary,
    cache_ptr,
    table_ptr,
    first,
    last,
    num_keys,
    position,
    scale,
    highest,
    total,
    acc,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attend to the rows of the cache from `first`, a multiple of TILE, to `last`.

    A query sees rows up to its own position. Rows from `num_keys` on are not read. Returns the
    softmax state: maximum, sum, output.
    """
    dims = tl.arange(0, acc.shape[1])
    turning = tl.arange(0, q_rotary.shape[1])
    offset = tl.arange(0, TILE)
    for start in range(first, last, TILE):
        keys = start + offset
        # A row that exists in place of those that do not: weight 0 times NaN would be NaN.
        real = tl.minimum(keys, num_keys - 1)
        # Block ids times the block's size can exceed 2**31.
        blocks = tl.load(table_ptr + real // BLOCK_SIZE).to(tl.int64)
        rows = (blocks * BLOCK_SIZE + real % BLOCK_SIZE) * (RANK + ROTARY)
        latent = _load_columns(cache_ptr + rows[:, None], dims, RANK)
        rotary = _load_columns(cache_ptr + rows[:, None] + RANK, turning, ROTARY)
        s = tl.dot(q, tl.trans(latent), input_precision="ieee")
        s = tl.dot(q_rotary, tl.trans(rotary), s, input_precision="ieee") * scale
        s = tl.where(keys[None, :] <= position[:, None], s, float("-inf"))
        now = tl.maximum(highest, tl.max(s, 1))
        weights = tl.exp2(s - now[:, None])
        shrink = tl.exp2(highest - now)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        highest = now
    return highest, total, acc


def _check(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    rank: int,
    num_decodes: int,
) -> int:
    """Check the arguments of a step; returns the number of sequences.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_tensor("q", q, (None, None, None), MODEL_DTYPES, like=q)
    device_of("q", q)
    check_cache(q, cache, q.shape[2], rank)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, like=q)
    num_seqs = len(seq_lens)
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, like=q)
    in_range = 0 <= num_decodes <= min(num_seqs, len(q))
    check(in_range, "num_decodes", f"must be from 0 to the number of sequences, got {num_decodes}")
    return num_seqs


def check_cache(q: Tensor, cache: Tensor, row_size: int, rank: int) -> None:
    """Check a cache of rows, and the sizes of a row.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_tensor("cache", cache, (None, None, row_size), q.dtype, like=q)
    block_size, rotary = cache.shape[1], row_size - rank
    powers = block_size & (block_size - 1) == 0 and 8 <= block_size <= 256
    check(powers, "cache", f"must have blocks of 8, 16, ... 256 tokens, got {block_size}")
    is_rank = 8 <= rank <= MAX_RANK and rank % 8 == 0
    check(is_rank, "rank", f"must be 8, 16, 24, ... {MAX_RANK}, got {rank}")
    is_rotary = 8 <= rotary <= MAX_ROTARY and rotary % 8 == 0
    check(is_rotary, "cache", f"must have rotary keys of 8, 16, ... {MAX_ROTARY}, got {rotary}")
