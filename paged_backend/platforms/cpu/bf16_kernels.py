"""Kernels that round rows to bf16, and multiply them with vector instructions.

The weights have the panels that AMX reads: pairs of values that follow each other in the depth.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from paged_backend.platforms.cpu.in_place import Initial
from paged_backend.platforms.cpu.kv_formats import to_bfloat16
from paged_backend.platforms.cpu.linear import make_multiply_panels
from paged_backend.platforms.cpu.llvm import INT64
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    array_at,
    claim_rows,
    device_function,
    floats,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES, Float32

_INT32 = ir.IntType(32)
_HIGH_HALF = np.uint32(0xFFFF0000)
MANY_ROWS = 12  # from here on, converting the weights first is faster


class BFloat16Pairs(Float32):
    """Two bf16 values in a word of A and of B, with float32 sums; see `Arithmetic`.

    The instruction of AVX512-BF16 is not used: at one row it is as fast as this, and at more rows
    it is slower than float32 (measured on a Xeon of 2023).
    """

    name = "bf16_pairs"

    def multiply_add(self, builder: Any, total: Any, a: Any, b: Any) -> Any:
        """See `Arithmetic.multiply_add`."""
        for half in (_low_half, _high_half):
            total = super().multiply_add(builder, total, half(builder, a), half(builder, b))
        return total


def _low_half(builder: Any, pairs: Any) -> Any:
    """Emit the first values of pairs, as float32."""
    words = builder.bitcast(pairs, ir.VectorType(_INT32, pairs.type.count))
    shift = ir.Constant(words.type, [16] * pairs.type.count)
    return builder.bitcast(builder.shl(words, shift), pairs.type)


def _high_half(builder: Any, pairs: Any) -> Any:
    """Emit the second values of pairs, as float32."""
    words = builder.bitcast(pairs, ir.VectorType(_INT32, pairs.type.count))
    mask = ir.Constant(words.type, [-(1 << 16)] * pairs.type.count)
    return builder.bitcast(builder.and_(words, mask), pairs.type)


@device_function
def round_row(x: Any, values: Any) -> None:
    """Round a row of float32 to bf16, and pad it with zeros."""
    for i in range(len(x)):
        values[i] = to_bfloat16(x[i], np.float32(1.0))
    for i in range(len(x), len(values)):
        values[i] = 0


def _round_rows(arguments: Any) -> None:
    _, x_at, values_at, rows, inputs, depth = numba.carray(arguments, 6)
    x = floats(x_at, (rows, inputs))
    values = array_at(values_at, (rows, depth), np.uint16)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            round_row(x[row], values[row])
        start, end = claim_rows(arguments, rows)


@device_function
def _split_row(x: Any, large: Any, small: Any) -> None:
    """Round a row of float32 to bf16, and what is left of it; pad both with zeros."""
    for i in range(len(x)):
        bits = to_bfloat16(x[i], np.float32(1.0))
        rounded = np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
        large[i] = bits
        small[i] = to_bfloat16(x[i] - rounded, np.float32(1.0))
    for i in range(len(x), len(large)):
        large[i] = small[i] = 0


def _split_rows(arguments: Any) -> None:
    _, x_at, values_at, rows, inputs, depth = numba.carray(arguments, 6)
    x = floats(x_at, (rows, inputs))
    values = array_at(values_at, (rows, 2, depth), np.uint16)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            _split_row(x[row], values[row, 0], values[row, 1])
        start, end = claim_rows(arguments, rows)


def _round_rows_in_float32(arguments: Any) -> None:
    """Round rows of float32 to numbers that bf16 has, and pad them with zeros."""
    _, x_at, values_at, rows, inputs, depth = numba.carray(arguments, 6)
    x = floats(x_at, (rows, inputs))
    values = array_at(values_at, (rows, depth), np.uint32)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            for i in range(inputs):
                values[row, i] = np.uint32(to_bfloat16(x[row, i], np.float32(1.0))) << np.uint32(16)
            for i in range(inputs, depth):
                values[row, i] = 0
        start, end = claim_rows(arguments, rows)


def _gather_rows(arguments: Any) -> None:
    """Copy rows of a weight from its panels of pairs, and convert them to float32."""
    _, index_at, panels, out_at, count, inputs, num_pairs = numba.carray(arguments, 7)
    index, out = longs(index_at, count), floats(out_at, (count, inputs))
    start, end = claim_rows(arguments, count)
    while start < end:
        for row in range(start, end):
            first = panels + index[row] // LANES * num_pairs * LANES * 4
            panel = array_at(first, (num_pairs, LANES), np.uint32)
            lane = index[row] % LANES
            for pair in range(inputs // 2):
                bits = panel[pair, lane]
                out[row, 2 * pair] = np.uint32(bits << np.uint32(16)).view(np.float32)
                out[row, 2 * pair + 1] = np.uint32(bits & _HIGH_HALF).view(np.float32)
            if inputs % 2:
                bits = panel[inputs // 2, lane]
                out[row, inputs - 1] = np.uint32(bits << np.uint32(16)).view(np.float32)
        start, end = claim_rows(arguments, count)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _unpack_rows(context: Any, source: Any, target: Any, rows: Any) -> Any:
    """Convert rows of LANES pairs, at an address, to twice as many rows of LANES float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), LANES).as_pointer()
        pairs, words = (builder.inttoptr(address, vector) for address in args[:2])
        with cgutils.for_range(builder, args[2]) as row:
            row_of_pairs = builder.load(builder.gep(pairs, [row.index]), align=4)
            for i, half in enumerate((_low_half, _high_half)):
                place = builder.add(builder.mul(row.index, INT64(2)), INT64(i))
                unpacked = half(builder, row_of_pairs)
                builder.store(unpacked, builder.gep(words, [place]), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@device_function
def unpack(panels: int, numbers: int, memory: Any) -> Any:
    """Convert panels of pairs to panels of float32 words."""
    address = np.int64(memory.ctypes.data)
    _unpack_rows(panels, address, numbers // (2 * LANES))
    return address


_multiply_pairs = make_multiply_panels(BFloat16Pairs())
_multiply_unpacked = make_multiply_panels(Float32(), unpack, word_bytes=2)


def _multiply_few_rows(arguments: Any) -> None:
    """Each thread rounds the rows for itself, which takes less time than another kernel."""
    words = numba.carray(arguments, 10)
    rows, depth, inputs = words[4], words[5], words[9]
    x = floats(words[1], (rows, inputs))
    values = np.empty((rows, 2 * depth), np.uint16)
    for row in range(rows):
        round_row(x[row], values[row])
    _multiply_pairs(arguments, np.int64(values.ctypes.data))
    values[0, 0] = (
        0  # numba frees an array after its own last use, even if its address is used later
    )


def _multiply_many_rows(arguments: Any) -> None:
    _multiply_unpacked(arguments, numba.carray(arguments, 2)[1])


_round, _split, _round_in_float32, _gather, _few_rows, _many_rows = (
    functools.cache(functools.partial(ParallelKernel, function))
    for function in (
        _round_rows,
        _split_rows,
        _round_rows_in_float32,
        _gather_rows,
        _multiply_few_rows,
        _multiply_many_rows,
    )
)


def round_rows(x: Tensor, rows: int, depth: int) -> Tensor:
    """Return `x` [.., inputs] float32 in bf16 [rows, depth]; columns after the inputs are zeros.

    Rows after the rows of `x` may hold anything.
    """
    values = torch.empty(rows, depth, dtype=torch.bfloat16)
    _round()(x.data_ptr(), values.data_ptr(), *x.shape, depth)
    return values


def split_rows(x: Tensor, rows: int, depth: int) -> Tensor:
    """Return the parts of `x` [.., inputs] float32 in bf16 [rows, 2, depth]: large, then small.

    Columns after the inputs are zeros. Rows after the rows of `x` may hold anything.
    """
    values = torch.empty(rows, 2, depth, dtype=torch.bfloat16)
    _split()(x.data_ptr(), values.data_ptr(), *x.shape, depth)
    return values


def gather_rows(panels: Tensor, index: Tensor, inputs: int) -> Tensor:
    """Return the rows at `index` [count] int64 of a weight in panels: [count, inputs] float32."""
    index, out = index.contiguous(), torch.empty(len(index), inputs)
    places = index.data_ptr(), panels.data_ptr(), out.data_ptr()
    _gather()(*places, *out.shape, panels.shape[1])
    return out


def multiply_panels(x: Tensor, panels: Tensor, out: Tensor, depth: int, initial: Initial) -> None:
    """Multiply rounded rows by panels with vector instructions.

    The sums are float32 products' in the order of the depth, for any number of rows.

    Args:
        x: [rows, inputs] float32.
        panels: [columns / LANES, depth / 2, LANES, 2] bf16.
        out: [rows, columns] float32.
        depth: the padded number of inputs.
        initial: what the sums begin with.
    """
    rows, columns = out.shape
    if 0 < rows < MANY_ROWS:
        places = x.data_ptr(), panels.data_ptr(), out.data_ptr()
        _few_rows()(*places, rows, depth // 2, columns, *initial, x.shape[1])
        return
    values = torch.empty(rows, depth)
    _round_in_float32()(x.data_ptr(), values.data_ptr(), *x.shape, depth)
    places = values.data_ptr(), panels.data_ptr(), out.data_ptr()
    _many_rows()(*places, rows, depth, columns, *initial)
