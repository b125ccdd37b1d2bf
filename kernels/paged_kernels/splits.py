"""Divides the keys of attention among programs, on the device, and merges their results.

FlashInfer's division of work (Ye et al., 2025, section 3.3.1): the keys of all items together are
divided into splits of nearly equal size, so that one long sequence among short ones does not delay
the whole step. No launch depends on a length, so a captured CUDA graph stays valid for all lengths.
The last program to finish a split of an item merges them, so there is no second launch.

The size of the splits is the one with the shortest modeled time. Its parts are those of
:class:`~paged_kernels.tuning.split_costs.SplitCosts`; `reference.splits.modeled_us` has the formula
in Python.
Programs that run at the same time share the memory's rate. As soon as they reach it, more of them
gain nothing, but splits must be merged. With few programs a tile takes as long as its loads do, so
that more and shorter splits are faster.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._softmax import LN2, LOWEST
from paged_kernels.errors import check
from paged_kernels.tuning.split_costs import SplitCosts
from paged_kernels.windows import Window, WindowConstants, first_visible

_SPLITS_AT_ONCE = 16  # splits of an item that a program plans together
_MOST_LOADED = 8  # splits of an item that a program loads together, to merge them
_ITEMS_AT_ONCE = 256  # items that the planning program reads together
_MOST_PARTS = 64  # splits of the longest item, at most


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
    window: Window | None


@dataclass(frozen=True, slots=True)
class SplitShape:
    """What determines a plan except the lengths."""

    num_items: int
    programs_per_split: int
    programs_per_wave: int  # that the device runs at the same time
    tile: int
    window: Window | None
    costs: SplitCosts

    @property
    def splits_per_wave(self) -> int:
        """The number of splits with programs that the device runs at the same time."""
        return max(1, self.programs_per_wave // self.programs_per_split)

    @property
    def max_splits(self) -> int:
        """The most splits of a plan: those of a wave, or of a wave more than whole items take."""
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
            self.programs_per_split,
            self.programs_per_wave,
            *astuple(self.costs),
            **WindowConstants.of(self.window)._asdict(),
            TILE=self.tile,
            BLOCK=_ITEMS_AT_ONCE,
            PARTS=_MOST_PARTS,
            SPLITS=_SPLITS_AT_ONCE,
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


def splits_at_once(rows: int, dim_padded: int, elements: int) -> int:
    """Return the number of splits of `rows` rows that a program merges together.

    A program has room for `elements` of them, but always for one split.
    """
    return max(1, min(_MOST_LOADED, elements // (rows * dim_padded)))


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@triton.jit(
    do_not_specialize=[
        *("num_items", "num_arrivals", "max_splits", "programs_per_split", "programs_per_wave"),
        *("start_us", "tile_us", "share_us", "merge_us", "merge_split_us", "merge_program_us"),
    ]
)
def _plan_kernel(
    lengths_ptr,
    splits_ptr,
    first_ptr,
    count_ptr,
    arrivals_ptr,
    num_items,
    num_arrivals,
    max_splits,
    programs_per_split,
    programs_per_wave,
    start_us,
    tile_us,
    share_us,
    merge_us,
    merge_split_us,
    merge_program_us,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program: choose the split size, then write the splits of each item."""
    offsets = tl.arange(0, BLOCK)
    size = _best_size(
        lengths_ptr, num_items, max_splits, programs_per_split, programs_per_wave,
        start_us, tile_us, share_us, merge_us, merge_split_us, merge_program_us,
        WINDOW, CHUNKED, TILE, BLOCK, PARTS,
    )  # fmt: skip

    num_divided = 0  # total splits of the items with more than one
    for base in range(0, num_items, BLOCK):
        _, _, tiles = _tiles(lengths_ptr, base + offsets, num_items, WINDOW, CHUNKED, TILE)
        count = tl.cdiv(tiles, size)
        num_divided += tl.sum(tl.where(count > 1, count, 0), 0)

    next_divided = 0
    next_whole = num_divided
    for base in range(0, num_items, BLOCK):
        items = base + offsets
        length, begin, tiles = _tiles(lengths_ptr, items, num_items, WINDOW, CHUNKED, TILE)
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
def _best_size(
    lengths_ptr,
    num_items,
    max_splits,
    programs_per_split,
    programs_per_wave,
    start_us,
    tile_us,
    share_us,
    merge_us,
    merge_split_us,
    merge_program_us,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the number of tiles of a split with the shortest modeled time.

    The sizes to choose from divide the longest item into 1, 2, ... PARTS splits.
    """
    total = 0
    longest = 0
    for base in range(0, num_items, BLOCK):
        items = base + tl.arange(0, BLOCK)
        _, _, tiles = _tiles(lengths_ptr, items, num_items, WINDOW, CHUNKED, TILE)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    sizes = tl.maximum(tl.cdiv(longest, 1 + tl.arange(0, PARTS)), 1)
    counts = tl.zeros([PARTS], tl.int32)
    divided = tl.zeros([PARTS], tl.int32)
    for base in range(0, num_items, BLOCK):
        items = base + tl.arange(0, BLOCK)
        _, _, tiles = _tiles(lengths_ptr, items, num_items, WINDOW, CHUNKED, TILE)
        each = tl.cdiv(tiles[:, None], sizes[None, :])
        counts += tl.sum(each, 0)
        divided += tl.sum(tl.where(each > 1, each, 0), 0)
    times = start_us + _modeled_us(
        total, counts, divided, sizes, tl.cdiv(longest, sizes),
        programs_per_split, programs_per_wave,
        tile_us, share_us, merge_us, merge_split_us, merge_program_us,
    )  # fmt: skip
    times = tl.where(counts <= max_splits, times, float("inf"))
    return tl.max(tl.where(times == tl.min(times, 0), sizes, 0), 0)


@triton.jit
def _modeled_us(
    total,
    counts,
    divided,
    sizes,
    most,
    programs_per_split,
    programs_per_wave,
    tile_us,
    share_us,
    merge_us,
    merge_split_us,
    merge_program_us,
):
    """Return the time of a launch with each of the split sizes, after its start.

    `total` is the number of tiles. `counts`, `divided` and `most` are the numbers of splits of all
    items, of those with several, and of the longest one.
    """
    programs = (counts * programs_per_split).to(tl.float32)
    # As many programs of the full size would do the same work.
    full = total.to(tl.float32) * programs_per_split / sizes
    wave = programs_per_wave.to(tl.float32)
    waves = full / wave
    wave_us = _programs_us(sizes, wave, tile_us, share_us)
    rest = programs - tl.floor(programs / wave) * wave  # programs of the last wave
    rest_us = _programs_us(sizes, rest, tile_us, share_us) - rest / wave * wave_us
    last_us = tl.where(rest > 0, tl.maximum(rest_us, 0.0), 0.0)
    # What is left of a split of the full size when much shorter ones have ended.
    alone_us = sizes * (1.0 - waves) * tile_us
    several_us = waves * wave_us + tl.maximum(last_us, alone_us)
    one_us = _programs_us(sizes, full, tile_us, share_us)
    time_us = tl.where(programs > wave, several_us, one_us)
    merging_us = merge_us + merge_split_us * most
    merging_us += merge_program_us * (divided * programs_per_split)
    return time_us + tl.where(most > 1, merging_us, 0.0)


@triton.jit
def _programs_us(tiles, programs, tile_us, share_us):
    """Return the time of programs of `tiles` tiles each that run at the same time."""
    shared = programs * share_us
    return tiles * tl.sqrt(tile_us * tile_us + shared * shared)


@triton.jit
def _tiles(
    lengths_ptr,
    items,
    num_items,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return each item's number of keys, its first key to read, and its number of tiles."""
    length = tl.load(lengths_ptr + items, mask=items < num_items, other=0)
    begin = tl.zeros_like(length)
    if WINDOW is not None:
        first = first_visible(tl.maximum(length - 1, 0), WINDOW, CHUNKED)
        begin = first // TILE * TILE
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
    first_dim=0,
):
    """Store final rows [ROWS, DIM padded] and, unless `lse_ptr` is None, their log-sum-exp.

    The columns of `acc` are those of the rows from `first_dim` on.
    """
    dims = first_dim + tl.arange(0, acc.shape[1])
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
    first_dim=0,
):
    """Merge `count` splits of an item from `first` on, always in the same order.

    Returns `DIM_PADDED` columns of the output from `first_dim` on, [rows, DIM_PADDED], and the
    log-sum-exp [rows], of the `real` ones of the rows that `query` and `head` name.
    """
    dims = first_dim + tl.arange(0, DIM_PADDED)
    highest = tl.full(real.shape, LOWEST, tl.float32)
    total = tl.zeros(real.shape, tl.float32)
    acc = tl.zeros([real.shape[0], DIM_PADDED], tl.float32)
    for base in range(0, count, SPLITS):
        # Loads of several splits are on their way together.
        for part in tl.static_range(SPLITS):
            here = real & (base + part < count)
            row = ((first + base + part).to(tl.int64) * num_queries + query) * HEADS + head
            # Other programs wrote these, so they are read from the cache that all programs share.
            lse = tl.load(
                partial_lse_ptr + row, mask=here, other=float("-inf"), cache_modifier=".cg"
            )
            values = tl.load(
                partial_ptr + (row * DIM)[:, None] + dims[None, :],
                mask=here[:, None] & (dims < DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            now = tl.maximum(highest, lse / LN2)
            weight = tl.exp2(lse / LN2 - now)
            shrink = tl.exp2(highest - now)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + values * weight[:, None]
            highest = now
    total = tl.where(real, total, 1.0)
    return acc / total[:, None], (highest + tl.log2(total)) * LN2
