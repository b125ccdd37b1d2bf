"""The products of adapters on the CPU, segment by segment: rows that have the same adapter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn.functional import pad

from paged_backend.checkpoint.peft import LowRank
from paged_backend.models.linear import LinearSpec
from paged_backend.models.step_context import SEGMENT_ROWS, AdapterRows
from paged_backend.platforms.cpu.llvm import INT64
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_function,
    floats,
    inlined,
    ints,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES
from paged_backend.platforms.cpu.vectors import FLOATS, load, splat, store_float32

_RANKS = 4  # sums that are computed side by side; ranks are padded to a multiple of it
_PANELS = 4  # that are added side by side
_BLOCK = 16 * LANES  # outputs of all rows of a segment that are added before the next ones
_ENTRY = 3  # numbers in the table for each part of a slot


class CpuLowRank:
    """Float32 weights; see :class:`~paged_backend.models.low_rank.LowRankProduct`.

    The kernel finds the weights by their addresses in a table, so that graphs remain valid when
    the adapter of a slot changes.

    Args:
        spec: the layer. If it is gated, its outputs are panels of gate and up in turns.
        num_slots: the number of adapters.
    """

    def __init__(self, spec: LinearSpec, num_slots: int) -> None:
        sizes = list(spec.parts.values())
        starts = [*accumulate(sizes[:-1], initial=0)]
        step = LANES
        if spec.gated:
            starts, step = [part * LANES for part in range(len(sizes))], len(sizes) * LANES
        # For each part: its outputs, the first of them, and the distance from panel to panel.
        self._parts = torch.tensor([(*pair, step) for pair in zip(sizes, starts, strict=True)])
        # For each slot and part: the addresses of a and b, and the rank.
        self._table = torch.zeros(num_slots, len(sizes), _ENTRY, dtype=torch.int64)
        self._weights: list[Sequence[LowRank | None]] = [[] for _ in range(num_slots)]
        _kernel()

    def prepared(self, parts: Sequence[LowRank | None]) -> Sequence[LowRank | None]:
        """Return `a` as [rank, inputs] and `b` in panels [outputs / 16, rank, 16], with zeros."""
        return [None if part is None else _in_panels(part) for part in parts]

    def set(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Replace the weights of a slot; see `LowRankProduct.set`."""
        self._weights[slot] = parts
        for row, part in zip(self._table[slot], parts, strict=True):
            entry = [0] * _ENTRY
            if part is not None:
                entry = [part.a.data_ptr(), part.b.data_ptr(), len(part.a)]
            row.copy_(torch.tensor(entry))

    def add_to(self, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add the product of each row; see `LowRankProduct.add_to`."""
        if out.dtype != torch.float32:  # the sums are rounded once
            sums = out.float()
            self.add_to(sums, x, rows)
            out.copy_(sums)
            return
        x = x.float().contiguous()
        tables = rows.slots, rows.order, rows.segments, rows.num_segments, self._table, self._parts
        sizes = len(x), x.shape[1], out.shape[1], len(self._parts)
        _kernel()(*(tensor.data_ptr() for tensor in (x, out, *tables)), *sizes)


def _in_panels(part: LowRank) -> LowRank:
    rank, outputs = part.b.shape
    missing = -rank % _RANKS
    a = pad(part.a.t(), (0, 0, 0, missing))
    b = pad(part.b, (0, -outputs % LANES, 0, missing)).reshape(rank + missing, -1, LANES)
    return LowRank(a.contiguous(), b.transpose(0, 1).contiguous())


@inlined
def _project(x: Any, a: Any, first: int, sums: Any) -> None:
    """Store the products of a row `x` and `_RANKS` rows of `a` from the first one on.

    They are sums that processors compute side by side.
    """
    sum_0 = sum_1 = sum_2 = sum_3 = np.float32(0)
    for k in range(len(x)):
        sum_0 += x[k] * a[first, k]
        sum_1 += x[k] * a[first + 1, k]
        sum_2 += x[k] * a[first + 2, k]
        sum_3 += x[k] * a[first + 3, k]
    sums[first], sums[first + 1], sums[first + 2], sums[first + 3] = sum_0, sum_1, sum_2, sum_3


def _make_add_panels(count: int) -> Any:
    """Return the function that adds some panels to the outputs of a row."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def add_panels(context: Any, factors: Any, rank: Any, panels: Any, out: Any, step: Any) -> Any:
        """Add the rows of panels [rank, LANES], times their factors [rank], to vectors.

        All arguments are addresses, but for the rank and the floats from a vector to the next one.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            factors, rank, panels, out, step = args
            factors = builder.inttoptr(factors, FLOATS.element.as_pointer())
            outs = [builder.add(out, builder.mul(step, INT64(i * 4))) for i in range(count)]
            totals = [
                cgutils.alloca_once_value(builder, load(builder, place, INT64(0))) for place in outs
            ]
            with cgutils.for_range(builder, rank) as loop:
                factor = splat(builder, builder.load(builder.gep(factors, [loop.index])))
                for i, total in enumerate(totals):
                    place = builder.add(builder.mul(rank, INT64(i)), loop.index)
                    product = builder.fmul(
                        factor, load(builder, panels, place), flags=("contract",)
                    )
                    after = builder.fadd(builder.load(total), product, flags=("contract",))
                    builder.store(after, total)
            for place, total in zip(outs, totals, strict=True):
                store_float32(builder, builder.load(total), place, INT64(0))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return add_panels


_add_panel, _add_panels = _make_add_panels(1), _make_add_panels(_PANELS)


@device_function
def _add_block(factors: int, rank: int, panels: int, out: int, step: int, size: int) -> None:
    """Add panels to `size` outputs of a row."""
    panel = 0
    while panel * LANES < size:
        weights, place = panels + panel * rank * (LANES * 4), out + panel * step * 4
        left = size - panel * LANES
        if left >= _PANELS * LANES:
            _add_panels(factors, rank, weights, place, step)
            panel += _PANELS
            continue
        if left >= LANES:
            _add_panel(factors, rank, weights, place, step)
        else:
            last, memory = floats(place, left), np.zeros(LANES, np.float32)
            memory[:left] = last
            _add_panel(factors, rank, weights, np.int64(memory.ctypes.data), step)
            last[:] = memory[:left]
        panel += 1


def _add_low_rank(arguments: Any) -> None:
    """Compute the outputs of one part of a layer for one segment, then the next ones."""
    words = numba.carray(arguments, 13)
    x_at, out_at, slots_at, order_at, segments_at, count_at, table_at, parts_at = words[1:9]
    num_rows, inputs, outputs, num_parts = words[9:13]
    x, order, slots = (
        floats(x_at, (num_rows, inputs)),
        ints(order_at, num_rows),
        ints(slots_at, num_rows),
    )
    num_segments = np.int64(ints(count_at, 1)[0])
    segments, parts = ints(segments_at, num_segments + 1), longs(parts_at, (num_parts, 3))
    piece = claim(arguments)
    while piece < num_segments * num_parts:
        segment, part = piece % num_segments, piece // num_segments
        rows = order[segments[segment] : segments[segment + 1]]
        entry = longs(table_at + (slots[rows[0]] * num_parts + part) * (_ENTRY * 8), _ENTRY)
        rank, size, step = entry[2], parts[part, 0], parts[part, 2]
        if rank > 0:
            a = floats(entry[0], (rank, inputs))
            sums = np.empty((SEGMENT_ROWS, rank), np.float32)
            for first in range(0, rank, _RANKS):
                for i in range(len(rows)):
                    _project(x[rows[i]], a, first, sums[i])
            for first in range(0, size, _BLOCK):
                weights = entry[1] + first * rank * 4
                start = parts[part, 1] + first // LANES * step
                for i in range(len(rows)):
                    place = out_at + (rows[i] * outputs + start) * 4
                    factors = np.int64(sums[i].ctypes.data)
                    _add_block(factors, rank, weights, place, step, min(_BLOCK, size - first))
            sums[0, 0] = 0  # numba frees an array after its last use, even if its address is in use
        piece = claim(arguments)


_kernel = cache(partial(ParallelKernel, _add_low_rank))
