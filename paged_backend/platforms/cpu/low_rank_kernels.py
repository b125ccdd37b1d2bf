"""The kernel of adapters' products on a CPU, for weights in 32 and in 16 bits.

Weights in 16 bits become float32 in registers, which is exact, so that the form of the weights does
not change a result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paged_backend.models.step_context import SEGMENT_ROWS
from paged_backend.platforms.cpu.kv_formats import BFloat16, Float16
from paged_backend.platforms.cpu.llvm import INT64
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_variant,
    floats,
    ints,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES, Float32, emit_prefetch
from paged_backend.platforms.cpu.vectors import (
    FLOATS,
    copies,
    fma,
    load,
    reduce_to_one,
    store_float32,
)

RANKS = 4
"""The number of sums that are computed side by side; ranks are padded to a multiple of it."""

ENTRY = 4
"""Numbers in the table for each part of a slot: addresses of a and b, rank and form."""

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""The forms of weights, as they are in the table."""

_PANELS = 4  # that are added side by side
_BLOCK = 16 * LANES  # outputs of all rows of a segment that are added before the next ones
_PREFETCH_BYTES = 2048  # distance between the weights that are read and those prefetched
_BYTE = ir.IntType(8)


def _weights(builder: Any, arithmetic: Float32, number_bytes: int, data: Any, index: Any) -> Any:
    """Emit the load of the vector of weights at an index, and the prefetch of a later one."""
    place = builder.inttoptr(data, _BYTE.as_pointer())
    place = builder.gep(place, [builder.mul(index, INT64(LANES * number_bytes))])
    emit_prefetch(builder, builder.gep(place, [INT64(_PREFETCH_BYTES)]))
    return arithmetic.load(builder, place, LANES)


def _make_project(arithmetic: Float32, number_bytes: int) -> Any:
    """Return the function that multiplies a row by RANKS rows of `a`."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def project(context: Any, x: Any, tail: Any, a: Any, steps: Any, sums: Any) -> Any:
        """Store RANKS products.

        All arguments are addresses, but for `steps`, the number of whole vectors of the row. If
        `tail` is not 0, a vector with the other inputs and zeros is there. The weights are
        [steps, RANKS, LANES].
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, tail, a, steps, sums = args
            zeros = ir.Constant(FLOATS, [0.0] * LANES)
            totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(RANKS)]

            def add(inputs: Any, step: Any) -> None:
                for i, total in enumerate(totals):
                    index = builder.add(builder.mul(step, INT64(RANKS)), INT64(i))
                    weights = _weights(builder, arithmetic, number_bytes, a, index)
                    builder.store(fma(builder, inputs, weights, builder.load(total)), total)

            with cgutils.for_range(builder, steps) as loop:
                add(load(builder, x, loop.index), loop.index)
            with builder.if_then(builder.icmp_signed("!=", tail, INT64(0))):
                add(load(builder, tail, INT64(0)), steps)
            target = builder.inttoptr(sums, FLOATS.element.as_pointer())
            for i, total in enumerate(totals):
                number = reduce_to_one(builder, "fadd", builder.load(total))
                builder.store(number, builder.gep(target, [INT64(i)]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return project


def _make_add_panels(arithmetic: Float32, number_bytes: int, count: int) -> Any:
    """Return the function that adds some panels to the outputs of a row."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def add_panels(context: Any, factors: Any, rank: Any, panels: Any, out: Any, step: Any) -> Any:
        """Add the rows of panels [rank, LANES], times their factors [rank], to vectors.

        All arguments are addresses, but for the rank and the floats from a vector to the next one.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            factors, rank, panels, out, step = args
            outs = [builder.add(out, builder.mul(step, INT64(i * 4))) for i in range(count)]
            totals = [
                cgutils.alloca_once_value(builder, load(builder, place, INT64(0))) for place in outs
            ]
            with cgutils.for_range(builder, rank) as loop:
                factor = copies(builder, factors, loop.index)
                for i, total in enumerate(totals):
                    place = builder.add(builder.mul(rank, INT64(i)), loop.index)
                    weights = _weights(builder, arithmetic, number_bytes, panels, place)
                    builder.store(fma(builder, factor, weights, builder.load(total)), total)
            for place, total in zip(outs, totals, strict=True):
                store_float32(builder, builder.load(total), place, INT64(0))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return add_panels


def _make_add_part(arithmetic: Float32, number_bytes: int) -> Callable[..., None]:
    """Return the device function that adds one part of a layer for the rows of a segment."""
    project = _make_project(arithmetic, number_bytes)
    add_panel = _make_add_panels(arithmetic, number_bytes, 1)
    add_panels = _make_add_panels(arithmetic, number_bytes, _PANELS)

    @device_variant(arithmetic.name)
    def add_block(factors: int, rank: int, panels: int, out: int, step: int, size: int) -> None:
        """Add panels to `size` outputs of a row."""
        panel = 0
        while panel * LANES < size:
            weights = panels + panel * rank * (LANES * number_bytes)
            place = out + panel * step * 4
            left = size - panel * LANES
            if left >= _PANELS * LANES:
                add_panels(factors, rank, weights, place, step)
                panel += _PANELS
                continue
            if left >= LANES:
                add_panel(factors, rank, weights, place, step)
            else:
                last, memory = floats(place, left), np.zeros(LANES, np.float32)
                memory[:left] = last
                add_panel(factors, rank, weights, np.int64(memory.ctypes.data), step)
                last[:] = memory[:left]
            panel += 1

    @device_variant(arithmetic.name)
    def project_row(x: Any, a: int, rank: int, sums: int) -> None:
        """Multiply a row `x` by all rows of `a` in groups."""
        steps, rest = len(x) // LANES, len(x) % LANES
        memory = np.zeros(LANES, np.float32)
        tail = np.int64(0)
        if rest:
            memory[:rest] = x[steps * LANES :]
            tail = np.int64(memory.ctypes.data)
        group = (steps + (1 if rest else 0)) * LANES * number_bytes
        for first in range(0, rank, RANKS):
            place = a + first * group
            project(np.int64(x.ctypes.data), tail, place, steps, sums + first * 4)
        memory[0] = 0  # numba frees an array after its last use, even if its address is in use

    @device_variant(arithmetic.name)
    def add_part(x: Any, rows: Any, entry: Any, out: int, outputs: int, part: Any) -> None:
        """Add the products of some rows of `x`.

        Args:
            x: [num_rows, inputs] float32.
            rows: the numbers of the rows.
            entry: addresses of `a` and `b`, and the rank.
            out: address of the result [num_rows, outputs] float32.
            outputs: size of a row of it.
            part: the number of outputs of the part, the first of them, and the floats from panel
                to panel.
        """
        rank, size, step = entry[2], part[0], part[2]
        sums = np.empty((SEGMENT_ROWS, rank), np.float32)
        for i in range(len(rows)):
            project_row(x[rows[i]], entry[0], rank, np.int64(sums[i].ctypes.data))
        for first in range(0, size, _BLOCK):
            weights = entry[1] + first * rank * number_bytes
            start = part[1] + first // LANES * step
            for i in range(len(rows)):
                place = out + (rows[i] * outputs + start) * 4
                factors = np.int64(sums[i].ctypes.data)
                add_block(factors, rank, weights, place, step, min(_BLOCK, size - first))
        sums[0, 0] = 0  # see `project_row`

    return add_part


_add_float32, _add_bfloat16, _add_float16 = (
    _make_add_part(arithmetic, number_bytes)
    for arithmetic, number_bytes in ((Float32(), 4), (BFloat16(), 2), (Float16(), 2))
)


def _add_low_rank(arguments: Any) -> None:
    """Compute the outputs of one part of a layer for one segment, then the next ones."""
    words = numba.carray(arguments, 13)
    x_at, out, slots_at, order_at, segments_at, count_at, table_at, parts_at = words[1:9]
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
        entry = longs(table_at + (slots[rows[0]] * num_parts + part) * (ENTRY * 8), ENTRY)
        if entry[2] > 0:
            if entry[3] == FLOAT32:
                _add_float32(x, rows, entry, out, outputs, parts[part])
            elif entry[3] == BFLOAT16:
                _add_bfloat16(x, rows, entry, out, outputs, parts[part])
            else:
                _add_float16(x, rows, entry, out, outputs, parts[part])
        piece = claim(arguments)


low_rank_kernel = cache(partial(ParallelKernel, _add_low_rank))
"""Return the kernel. Its arguments, from the second one on, are the addresses of the rows, of the
result, of the slots, the order, the segments and their number, of the table and of the parts; then
the number of rows, of inputs, of outputs and of parts."""
