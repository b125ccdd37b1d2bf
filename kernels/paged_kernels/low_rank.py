"""Products of low rank, chosen row by row: what LoRA adapters add to the output of a layer.

Hu et al., "LoRA" (2021), section 4.1; many adapters in one batch: Chen et al., "Punica" (2023),
section 4, and Sheng et al., "S-LoRA" (2023), section 5. Rows are not sorted by adapter. Tokens of a
prompt are neighbors with one adapter, so a tile of rows has few adapters, and its programs find
them on the device: a launch depends on sizes alone and can be captured in a CUDA graph.

A row's result does not depend on other rows, to the last bit. `shrink` adds up splits of K, which
follow from K alone. Few rows: each split is a separate program, and `expand` adds the sums of the
splits in their order. Many rows: one program adds all splits of its tile in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning.low_rank import low_rank_config, shrink_splits

RANKS = (16, 32, 64)
"""The ranks that weights can be padded to; tensor cores multiply 16 columns at once."""

_NONE = tl.constexpr(2**30)  # larger than any slot


@triton.jit
def _load_slots(slots_ptr, row, rows):
    """Load the slots of some rows that this program computes; `_NONE` for all others.

    The programs of a tile divide its slots among themselves.
    """
    slots = tl.load(slots_ptr + row, mask=row < rows, other=-1)
    mine = (slots >= 0) & (slots % tl.num_programs(1) == tl.program_id(1))
    return tl.where(mine, slots, _NONE)


@triton.jit
def _next_slot(slots, slot):
    """Return the smallest of the slots that is larger than `slot`; `_NONE` if there is none."""
    return tl.min(tl.where(slots > slot, slots, _NONE), 0)


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    slots_ptr,
    out_ptr,
    rows,
    K: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one part of one tile of rows, `SPLITS` splits of K of some of its slots."""
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, program = tl.program_id(2) % PARTS, tl.program_id(2) // PARTS
    line = tl.arange(0, RANK)
    slots = _load_slots(slots_ptr, row, rows)
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * K
    at = ((program * rows + row).to(tl.int64) * PARTS + part) * RANK
    slot = _next_slot(slots, -1)
    while slot < _NONE:
        index = slot.to(tl.int64) * PARTS + part
        rank = tl.load(ranks_ptr + index)
        if rank > 0:
            a_ptrs = a_ptr + (index * RANK + line)[:, None] * K
            total = tl.zeros([RANK, ROWS], tl.float32)
            for split in range(program * SPLITS, program * SPLITS + SPLITS):
                total += _sum_split(
                    x_ptrs, a_ptrs, slots == slot, line < rank, split * SPLIT_SIZE,
                    K, SPLIT_SIZE, RANK, ROWS, BLOCK_K,
                )  # fmt: skip
            mask = (slots == slot)[:, None]
            tl.store(out_ptr + at[:, None] + line[None, :], tl.trans(total), mask=mask)
        slot = _next_slot(slots, slot)


@triton.jit
def _sum_split(
    x_ptrs,
    a_ptrs,
    mine,
    exists,
    begin,
    K: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums [RANK, ROWS] over one split of K.

    Args:
        x_ptrs: [ROWS, 1] the rows.
        a_ptrs: [RANK, 1] the lines of the weights.
        mine: [ROWS] which rows are read.
        exists: [RANK] which lines are read.
        begin: the first column.
    """
    total = tl.zeros([RANK, ROWS], tl.float32)
    for start in range(0, SPLIT_SIZE, BLOCK_K):
        column = begin + start + tl.arange(0, BLOCK_K)
        x_mask, a_mask = mine[:, None], exists[:, None]
        if K % SPLIT_SIZE != 0:
            x_mask, a_mask = x_mask & (column < K)[None, :], a_mask & (column < K)[None, :]
        x = tl.load(x_ptrs + column[None, :], mask=x_mask, other=0.0)
        a = tl.load(a_ptrs + column[None, :], mask=a_mask, other=0.0)
        total = tl.dot(a, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    sums_ptr,
    b_ptr,
    ranks_ptr,
    slots_ptr,
    out_ptr,
    rows,
    SIZES: tl.constexpr,
    N: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one tile of rows and of the features of a part, for some of its slots."""
    wait_for_launch_before(DEPENDENT)
    PARTS: tl.constexpr = len(SIZES)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    part, first, end = _part_of_tile(tl.program_id(2), SIZES, FEATURES)
    feature = first + tl.arange(0, FEATURES)
    column = tl.arange(0, RANK)
    slots = _load_slots(slots_ptr, row, rows)
    slot = _next_slot(slots, -1)
    while slot < _NONE:
        if tl.load(ranks_ptr + slot * PARTS + part) > 0:
            mine = slots == slot
            sums = tl.zeros([ROWS, RANK], tl.float32)
            for split in tl.static_range(SPLITS):
                at = ((split * rows + row) * PARTS + part) * RANK
                sums += tl.load(
                    sums_ptr + at[:, None] + column[None, :], mask=mine[:, None], other=0.0
                )
            b_ptrs = b_ptr + (slot.to(tl.int64) * N + feature)[:, None] * RANK + column[None, :]
            b = tl.load(b_ptrs, mask=(feature < end)[:, None], other=0.0)
            out_ptrs = out_ptr + row[:, None] * N + feature[None, :]
            mask = mine[:, None] & (feature < end)[None, :]
            out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
            out += tl.trans(_product(b, tl.trans(sums)))
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
        slot = _next_slot(slots, slot)


@triton.jit
def _part_of_tile(tile, SIZES: tl.constexpr, FEATURES: tl.constexpr):
    """Return the part of a tile of features, the tile's first feature, and the end of the part."""
    part, first, end = 0, tile * FEATURES, 0 + SIZES[0]
    num_tiles, begin = 0, 0
    for index in tl.static_range(1, len(SIZES)):
        num_tiles += triton.cdiv(SIZES[index - 1], FEATURES)
        begin += SIZES[index - 1]
        if tile >= num_tiles:
            part, first = index, begin + (tile - num_tiles) * FEATURES
            end = begin + SIZES[index]
    return part, first, end


@triton.jit
def _product(b, sums):
    """Multiply weights by sums in float32, which 16-bit tensor cores need two numbers for."""
    dtype: tl.constexpr = b.dtype
    if dtype == tl.float32:
        return tl.dot(b, sums, input_precision="ieee")
    else:
        high = sums.to(dtype)
        low = (sums - high.to(tl.float32)).to(dtype)
        return tl.dot(b, high, tl.dot(b, low))


def shrink(x: Tensor, a: Tensor, ranks: Tensor, slots: Tensor) -> Tensor:
    """Multiply each row by the weights of its slot, in float32.

    Args:
        x: [rows, K] bfloat16, float16 or float32.
        a: [num_slots, parts, max_rank, K], dtype of `x`; `max_rank` is one of `RANKS`. Lines beyond
            the rank are not read.
        ranks: [num_slots, parts] int32, at most max_rank; 0 for a part without weights.
        slots: [at least rows] int32 from 0 to num_slots - 1, or negative for none.

    Returns:
        [splits, rows, parts, max_rank] float32, for `expand`, which adds up the splits. Only parts
        of rows that have weights have values.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("x", x, (None, None), MODEL_DTYPES, like=x)
    device = device_of("x", x)
    rows, width = x.shape
    check(width > 0, "x", "must have at least one column")
    check_tensor("a", a, (None, None, None, width), x.dtype, like=x)
    num_slots, parts, max_rank, _ = a.shape
    check(max_rank in RANKS, "a", f"must have 16, 32 or 64 lines for each part, got {max_rank}")
    _check_slots(x, slots, ranks, num_slots, parts)
    config = low_rank_config(rows, max_rank, x.element_size())
    splits, split_size = shrink_splits(width)
    num_splits = splits if config.split else 1
    sums = torch.empty((num_splits, rows, parts, max_rank), dtype=torch.float32, device=x.device)
    if rows and num_slots:
        tiles = triton.cdiv(rows, config.rows)
        _shrink_kernel[(tiles, min(num_slots, config.programs), parts * num_splits)](
            x,
            a,
            ranks,
            slots,
            sums,
            rows,
            K=width,
            RANK=max_rank,
            PARTS=parts,
            SPLIT_SIZE=split_size,
            SPLITS=splits // num_splits,
            ROWS=config.rows,
            BLOCK_K=config.columns,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **dependent_launch(device),
        )
    return sums


def expand(
    out: Tensor, sums: Tensor, b: Tensor, ranks: Tensor, slots: Tensor, sizes: Sequence[int]
) -> None:
    """Add the product of each row's sums and the weights of its slot to `out`, in place.

    The product is computed in float32 (with 16 bits of the sums where the weights have 16 bits) and
    rounded once, together with `out`. Rows without a slot keep their bits.

    Args:
        out: [rows, N] bfloat16, float16 or float32.
        sums: the result of `shrink` for these rows, ranks and slots.
        b: [num_slots, N, max_rank], dtype of `out`, zero beyond the rank.
        ranks: as for `shrink`.
        slots: as for `shrink`.
        sizes: the number of features of each part; their sum is N.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("out", out, (None, None), MODEL_DTYPES, like=out)
    device = device_of("out", out)
    rows, features = out.shape
    check_tensor("sums", sums, (None, rows, None, None), torch.float32, like=out)
    splits, _, parts, max_rank = sums.shape
    check(max_rank in RANKS, "sums", f"must have 16, 32 or 64 columns, got {max_rank}")
    check_tensor("b", b, (None, features, max_rank), out.dtype, like=out)
    _check_slots(out, slots, ranks, len(b), parts)
    fit = len(sizes) == parts and sum(sizes) == features and min(sizes, default=0) > 0
    check(fit, "sizes", f"must be {parts} positive numbers with the sum {features}, got {sizes}")
    if rows and len(b):
        config = low_rank_config(rows, max_rank, out.element_size())
        tiles = sum(triton.cdiv(size, config.features) for size in sizes)
        grid = triton.cdiv(rows, config.rows), min(len(b), config.programs), tiles
        _expand_kernel[grid](
            sums,
            b,
            ranks,
            slots,
            out,
            rows,
            SIZES=tuple(sizes),
            N=features,
            RANK=max_rank,
            SPLITS=splits,
            ROWS=config.rows,
            FEATURES=config.features,
            num_warps=config.num_warps,
            **dependent_launch(device),
        )


def _check_slots(x: Tensor, slots: Tensor, ranks: Tensor, num_slots: int, parts: int) -> None:
    check_tensor("ranks", ranks, (num_slots, parts), torch.int32, like=x)
    check_tensor("slots", slots, (None,), torch.int32, like=x)
    check(len(slots) >= len(x), "slots", f"must have at least {len(x)} elements, got {len(slots)}")
