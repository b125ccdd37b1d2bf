"""Divides the keys of attention among programs, on the device, and merges their results.

FlashInfer's division of work (Ye et al., 2025, section 3.3.1): the keys of all items together are
divided into splits of nearly equal size, so that one long sequence among short ones does not delay
the whole step. No launch depends on a length, so a captured CUDA graph stays valid for all lengths.
The last program to finish a split of an item merges them, so there is no second launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._softmax import LN2, LOWEST
from paged_kernels.errors import check

SPLITS_AT_ONCE = 16  # splits of an item that a program plans or merges together
_MERGED_AT_ONCE = 8192  # elements of them, at most: more would take too many registers
_ITEMS_AT_ONCE = 256  # items that the planning program reads together
_SIZES_AT_ONCE = 32  # split sizes that it tries together


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The splits of the keys of a step's items, made once for all layers of a shape and window.

    An item is a sequence or, of a prompt, a tile of its queries. A split is a contiguous range of
    one item's keys. `splits` is filled from the front, with the splits of divided items first,
    because they take longest. Calls that share a plan must run one after the other, because each of
    them counts in `arrivals`.
    """

    splits: Tensor  # [max_splits, 4] int32: item or -1, first key, end, 1 if the sole split
    first_split: Tensor  # [num_items] int32
    num_splits: Tensor  # [num_items] int32
    arrivals: Tensor  # [num_items * programs_per_split] int32, zeros between calls
    tile: int  # keys; splits begin at multiples of it
    window: int | None


@dataclass(frozen=True, slots=True)
class SplitShape:
    """What determines a plan except the lengths."""

    num_items: int
    programs_per_split: int
    programs_per_wave: int  # that the device runs at the same time
    tile: int
    window: int | None

    @property
    def splits_per_wave(self) -> int:
        """The number of splits with programs that the device runs at the same time."""
        return max(1, self.programs_per_wave // self.programs_per_split)

    @property
    def max_splits(self) -> int:
        """The most splits of a plan; see `_plan_kernel`."""
        if 2 * self.num_items <= self.splits_per_wave:
            return self.splits_per_wave
        return (-(-self.num_items // self.splits_per_wave) + 1) * self.splits_per_wave

    def plan(self, lengths: Tensor) -> SplitPlan:
        """Plan the splits of items with these numbers of keys, [num_items] int32."""
        plan = SplitPlan(
            splits=_new(lengths, self.max_splits, 4),
            first_split=_new(lengths, self.num_items),
            num_splits=_new(lengths, self.num_items),
            arrivals=_new(lengths, self.num_items * self.programs_per_split),
            tile=self.tile,
            window=self.window,
        )
        _plan_kernel[(1,)](
            lengths,
            plan.splits,
            plan.first_split,
            plan.num_splits,
            plan.arrivals,
            self.num_items,
            len(plan.arrivals),
            self.max_splits,
            self.splits_per_wave,
            WINDOW=self.window,
            TILE=self.tile,
            BLOCK=_ITEMS_AT_ONCE,
            SIZES=_SIZES_AT_ONCE,
            SPLITS=SPLITS_AT_ONCE,
            num_warps=8,
            num_stages=1,
        )
        return plan

    def check(self, plan: SplitPlan) -> None:
        """Check that a plan was made for this shape.

        Raises:
            ArgumentError: it was made for another one.
        """
        fits = len(plan.num_splits) == self.num_items and plan.tile == self.tile
        check(fits, "plan", "was made for another batch")
        check(plan.window == self.window, "plan", f"was made for a window of {plan.window}")
        room = len(plan.splits) >= self.max_splits
        room &= len(plan.arrivals) == self.num_items * self.programs_per_split
        check(room, "plan", "was made for another shape")


def splits_at_once(rows: int, dim_padded: int) -> int:
    """Return the number of splits of `rows` rows that a program merges together."""
    return max(1, min(SPLITS_AT_ONCE, _MERGED_AT_ONCE // (rows * dim_padded)))


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@triton.jit(do_not_specialize=["num_items", "num_arrivals", "max_splits", "splits_per_wave"])
def _plan_kernel(
    lengths_ptr,
    splits_ptr,
    first_ptr,
    count_ptr,
    arrivals_ptr,
    num_items,
    num_arrivals,
    max_splits,
    splits_per_wave,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program: choose the split size, then write the splits of each item.

    The size is the smallest with which all splits fit in the waves that whole items would take.
    If one of these waves has hardly any room for more splits, a long item could remain whole
    and delay the step. Another wave is added if a split would have more than twice its even share.
    This never happens if a wave has room for twice the number of items.
    """
    offsets = tl.arange(0, BLOCK)
    total = 0
    longest = 0
    num_read = 0  # items with keys to read
    for base in range(0, num_items, BLOCK):
        _, _, tiles = _tiles(lengths_ptr, base + offsets, num_items, WINDOW, TILE)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        num_read += tl.sum((tiles > 0).to(tl.int32), 0)
    most = tl.maximum(1, tl.cdiv(num_read, splits_per_wave)) * splits_per_wave
    size = _smallest_size(
        lengths_ptr, num_items, total, longest, most, WINDOW, TILE, BLOCK, SIZES
    )  # fmt: skip
    if size > 2 * tl.cdiv(total, splits_per_wave):
        most += splits_per_wave
        size = _smallest_size(
            lengths_ptr, num_items, total, longest, most, WINDOW, TILE, BLOCK, SIZES
        )  # fmt: skip

    num_divided = 0  # total splits of the items with more than one
    for base in range(0, num_items, BLOCK):
        _, _, tiles = _tiles(lengths_ptr, base + offsets, num_items, WINDOW, TILE)
        count = tl.cdiv(tiles, size)
        num_divided += tl.sum(tl.where(count > 1, count, 0), 0)

    next_divided = 0
    next_whole = num_divided
    for base in range(0, num_items, BLOCK):
        items = base + offsets
        length, begin, tiles = _tiles(lengths_ptr, items, num_items, WINDOW, TILE)
        count = tl.cdiv(tiles, size)
        divided = tl.where(count > 1, count, 0)
        whole = tl.where(count == 1, 1, 0)
        first = tl.where(
            count > 1,
            next_divided + tl.cumsum(divided, 0) - divided,
            next_whole + tl.cumsum(whole, 0) - whole,
        )
        tl.store(first_ptr + items, first, mask=items < num_items)
        tl.store(count_ptr + items, count, mask=items < num_items)
        for start in range(0, tl.max(count, 0), SPLITS):
            index = start + tl.arange(0, SPLITS)[None, :]
            rows = splits_ptr + (first[:, None] + index) * 4
            here = index < count[:, None]
            key = begin[:, None] + index * size * TILE
            tl.store(rows, items[:, None], mask=here)
            tl.store(rows + 1, key, mask=here)
            tl.store(rows + 2, tl.minimum(key + size * TILE, length[:, None]), mask=here)
            tl.store(rows + 3, (count == 1).to(tl.int32)[:, None], mask=here)
        next_divided += tl.sum(divided, 0)
        next_whole += tl.sum(whole, 0)

    for base in range(next_whole, max_splits, BLOCK):
        split = base + offsets
        tl.store(splits_ptr + split * 4, tl.full([BLOCK], -1, tl.int32), mask=split < max_splits)
    for base in range(0, num_arrivals, BLOCK):
        place = base + offsets
        tl.store(arrivals_ptr + place, tl.zeros([BLOCK], tl.int32), mask=place < num_arrivals)


@triton.jit
def _smallest_size(
    lengths_ptr,
    num_items,
    total,
    longest,
    max_splits,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Return the smallest number of tiles in a split that makes at most `max_splits` splits.

    `total` and `longest` are tiles of all items and of one; `max_splits` is at least the number
    of items with keys.
    """
    low = tl.maximum(1, tl.cdiv(total, max_splits))
    high = tl.maximum(low, longest)  # always small enough a number of splits
    while low < high:
        step = tl.cdiv(high - low, SIZES)
        sizes = low + tl.arange(0, SIZES) * step
        counts = tl.zeros([SIZES], tl.int32)
        for base in range(0, num_items, BLOCK):
            items = base + tl.arange(0, BLOCK)
            _, _, tiles = _tiles(lengths_ptr, items, num_items, WINDOW, TILE)
            counts += tl.sum(tl.cdiv(tiles[:, None], sizes[None, :]), 0)
        too_small = tl.sum((counts > max_splits).to(tl.int32), 0)
        high = tl.minimum(high, low + too_small * step)
        low += tl.maximum(0, (too_small - 1) * step + 1)
    return low


@triton.jit
def _tiles(lengths_ptr, items, num_items, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return each item's number of keys, its first key to read, and its number of tiles."""
    length = tl.load(lengths_ptr + items, mask=items < num_items, other=0)
    begin = tl.zeros_like(length)
    if WINDOW is not None:
        begin = tl.maximum(length - WINDOW, 0) // TILE * TILE
    return length, begin, tl.cdiv(length - begin, TILE)


@triton.jit
def store_result(
    out_ptr,
    lse_ptr,
    token,
    head,
    real,
    acc,
    lse,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    OUT_HEAD_STRIDE: tl.constexpr,
):
    """Store final rows [ROWS, DIM padded] and, unless `lse_ptr` is None, their log-sum-exp."""
    dims = tl.arange(0, acc.shape[1])
    at = token * OUT_STRIDE + head * OUT_HEAD_STRIDE
    kept = real[:, None] & (dims < DIM)[None, :]
    tl.store(out_ptr + at[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=kept)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * HEADS + head, lse, mask=real)


@triton.jit
def is_last(arrivals_ptr, count):
    """Count this program; return whether it is the last of `count` to arrive.

    The last one sees all that the others have stored, and leaves the counter at 0.
    """
    tl.debug_barrier()  # all threads of the program have stored
    last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrivals_ptr, 0)
    return last


@triton.jit
def merge_splits(
    partial_ptr,
    partial_lse_ptr,
    first,
    count,
    num_queries,
    query,
    head,
    real,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge `count` splits of an item from `first` on, always in the same order.

    Returns the output [rows, DIM padded] and the log-sum-exp [rows] of the `real` ones of the rows
    that `query` and `head` name.
    """
    dims = tl.arange(0, DIM_PADDED)
    highest = tl.full(real.shape, LOWEST, tl.float32)
    total = tl.zeros(real.shape, tl.float32)
    acc = tl.zeros([real.shape[0], DIM_PADDED], tl.float32)
    for base in range(0, count, SPLITS):
        split = base + tl.arange(0, SPLITS)
        row = (first + split).to(tl.int64)[:, None] * num_queries + query[None, :]
        row = row * HEADS + head[None, :]
        here = (split < count)[:, None] & real[None, :]
        # Other programs wrote these, so they are read from the cache that all programs share.
        lse = (
            tl.load(partial_lse_ptr + row, mask=here, other=float("-inf"), cache_modifier=".cg")
            / LN2
        )
        values = tl.load(
            partial_ptr + (row * DIM)[:, :, None] + dims[None, None, :],
            mask=here[:, :, None] & (dims < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        now = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - now[None, :])
        shrink = tl.exp2(highest - now)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        highest = now
    total = tl.where(real, total, 1.0)
    return acc / total[:, None], (highest + tl.log2(total)) * LN2
