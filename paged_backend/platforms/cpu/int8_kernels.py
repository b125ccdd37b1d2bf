"""Kernels that round rows to int8 and multiply them with exact int32 sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.extending import intrinsic

from paged_backend.platforms.cpu.amx import (
    ROWS,
    has_amx,
    multiply_int8_tile,
    panels_at_once,
    release_tiles,
    use_tiles,
)
from paged_backend.platforms.cpu.int8 import Avx2, Vnni
from paged_backend.platforms.cpu.math import maximum
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    array_at,
    claim,
    claim_rows,
    device_function,
    device_variant,
    exact_function,
    floats,
    inlined,
    ints,
)
from paged_backend.platforms.cpu.tiles import LANES, Arithmetic, make_multiply

DEPTH = 64  # inputs are padded to a multiple: the bytes in a row of an AMX tile
WIDTH = 4 * LANES  # columns of a piece of work
BLOCK = 2 * ROWS  # rows of sums that are kept before they are scaled
_LARGEST = np.float32(127.0)  # what the largest absolute value of a row becomes
OFFSET = 128  # zero point of unsigned values
_CPU = get_host_cpu_features()
_VNNI = bool(_CPU.get("avx512vnni") or _CPU.get("avxvnni"))
_MAGIC = 1.5 * 2**23  # its last bit counts ones, so adding it rounds to an integer


@exact_function
def _quotient(dividend: Any, divisor: Any) -> Any:
    return dividend / divisor


@exact_function
def scaled(total: Any, row_scale: Any, scale: Any) -> Any:
    return np.float32(total) * (row_scale * scale)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _rounded(context: Any, value: Any, factor: Any) -> Any:
    """Return the integer int32 next to value * factor; ties go to the even one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magic = ir.Constant(ir.FloatType(), _MAGIC)
        total = builder.fma(*args, magic)
        bits = builder.bitcast(total, ir.IntType(32))
        return builder.sub(bits, builder.bitcast(magic, ir.IntType(32)))

    return types.int32(types.float32, types.float32), generate


@device_function
def quantize_row(x: Any, values: Any, offset: int) -> Any:
    """Round a row to int8 plus an offset; returns its scale."""
    largest = np.float32(0.0)
    for i in range(len(x)):
        largest = maximum(largest, abs(x[i]))
    factor = _quotient(_LARGEST, largest) if largest > 0 else np.float32(0.0)
    for i in range(len(x)):
        values[i] = _rounded(x[i], factor) + offset
    for i in range(len(x), len(values)):
        values[i] = offset
    return _quotient(largest, _LARGEST)


def _quantize_to_bytes(arguments: Any) -> None:
    _, x_at, values_at, scales_at, rows, inputs, depth = numba.carray(arguments, 7)
    x, scales = floats(x_at, (rows, inputs)), floats(scales_at, rows)
    values = array_at(values_at, (rows, depth), np.uint8)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            scales[row] = quantize_row(x[row], values[row], np.int32(OFFSET))
        start, end = claim_rows(arguments, rows)


def _quantize_to_int16(arguments: Any) -> None:
    _, x_at, values_at, scales_at, rows, inputs, depth = numba.carray(arguments, 7)
    x, scales = floats(x_at, (rows, inputs)), floats(scales_at, rows)
    values = array_at(values_at, (rows, depth), np.int16)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            scales[row] = quantize_row(x[row], values[row], np.int32(0))
        start, end = claim_rows(arguments, rows)


class _Product(NamedTuple):
    """The arguments of a product as arrays and addresses."""

    values: Any  # address of [rows, depth], rounded inputs
    row_scales: Any  # [rows]
    panels: Any  # address of the weight
    scales: Any  # [columns]
    is_scaled: Any  # whether sums are scaled; if not, they are stored as int32
    corrections: Any  # [columns], what offsets of the values add to sums
    out: Any  # [rows, columns]
    depth: Any
    initial: Any  # address of the floats that sums begin with, or 0
    initial_stride: Any  # in floats, from a row to the next one


@device_function
def _unpack(arguments: Any) -> _Product:
    words = numba.carray(arguments, 12)
    values, row_scales, panels, scales, corrections, out = words[1:7]
    rows, depth, columns, initial, initial_stride = words[7:12]
    return _Product(
        values,
        floats(row_scales, rows),
        panels,
        floats(scales, columns),
        scales != 0,
        ints(corrections, columns),
        floats(out, (rows, columns)),
        depth,
        initial,
        initial_stride,
    )


@device_function
def _width(product: Any, column: int) -> Any:
    """Return the number of columns of a piece of work, in whole panels."""
    return min(WIDTH, (product.out.shape[1] - column + LANES - 1) // LANES * LANES)


@device_function
def _finish(product: Any, sums: Any, row: int, rows: int, column: int) -> None:
    """Scale the sums of some rows and up to `WIDTH` columns, add `initial`, and store them."""
    columns = product.out.shape[1]
    width = min(WIDTH, columns - column)
    scales, corrections = product.scales[column:], product.corrections[column:]
    if not product.is_scaled:
        integers = product.out.view(np.int32)
        for i in range(rows):
            for j in range(width):
                integers[row + i, column + j] = sums[i, j] + corrections[j]
        return
    for i in range(rows):
        row_scale = product.row_scales[row + i]
        out = product.out[row + i, column:]
        if product.initial != 0:
            place = product.initial + ((row + i) * product.initial_stride + column) * 4
            before = floats(place, width)
            for j in range(width):
                total = sums[i, j] + corrections[j]
                out[j] = before[j] + scaled(total, row_scale, scales[j])
        else:
            for j in range(width):
                total = sums[i, j] + corrections[j]
                out[j] = scaled(total, row_scale, scales[j])


def _make_multiply_rows(arithmetic: Arithmetic, values_per_word: int) -> Any:
    """Return the device function that multiplies some rows by some panels with vectors.

    multiply_rows(values, rows, panels, columns, depth, sums) takes the addresses of rounded inputs
    [rows, depth], of panels, and of int32 sums with a row of `WIDTH` for each row of inputs.
    `columns` is a multiple of LANES.

    Args:
        arithmetic: arithmetic of the products.
        values_per_word: the number of rounded inputs in a word of 32 bits.
    """
    multiply, panel_words = make_multiply(arithmetic, streams=True), LANES * values_per_word // 4

    @device_variant(arithmetic.name)
    def multiply_rows(
        values: int, rows: int, panels: int, columns: int, depth: int, sums: int
    ) -> None:
        steps = depth // values_per_word
        multiply(
            *(rows, columns, values, steps, panels, panel_words, panel_words * steps),
            *(sums, WIDTH, steps, np.int64(0), np.int64(0)),
        )

    return multiply_rows


multiply_rows_with_vnni = _make_multiply_rows(
    Vnni(16 if _CPU.get("avx512vnni") else 8), values_per_word=4
)
multiply_rows_with_avx2 = _make_multiply_rows(Avx2(), values_per_word=2)


@device_function
def multiply_rows_with_amx(
    values: int, rows: int, panels: int, columns: int, depth: int, sums: int
) -> None:
    """Multiply the same on AMX units, up to `BLOCK` rows, of which whole tiles are read."""
    row_tiles = 2 if rows > ROWS else 1
    panel = 0
    while panel < columns // LANES:
        count = panels_at_once(row_tiles, columns // LANES - panel)
        multiply_int8_tile(
            *(row_tiles, count, values, depth, panels + panel * LANES * depth, LANES * depth),
            *(sums + panel * LANES * 4, np.int64(WIDTH * 4), depth // DEPTH),
            *(np.int64(0), np.int64(0)),
        )
        panel += count


def _make_multiply_all(multiply_rows: Any, value_bytes: int) -> Any:
    """Return the device function that computes a `_Product`.

    Args:
        multiply_rows: see `_make_multiply_rows`.
        value_bytes: the size of a rounded input.
    """

    @inlined
    def multiply_all(arguments: Any, product: _Product) -> None:
        rows, depth = len(product.row_scales), product.depth
        sums = np.empty((BLOCK, WIDTH), np.int32)
        sums_at = np.int64(sums.ctypes.data)
        column = claim(arguments) * WIDTH
        while column < product.out.shape[1]:
            panels, width = product.panels + column * depth, _width(product, column)
            for row in range(0, rows, BLOCK):
                count = min(BLOCK, rows - row)
                values = product.values + row * depth * value_bytes
                multiply_rows(values, count, panels, width, depth, sums_at)
                _finish(product, sums, row, count, column)
            column = claim(arguments) * WIDTH

    return multiply_all


_multiply_vnni = _make_multiply_all(multiply_rows_with_vnni, 1)
_multiply_avx2 = _make_multiply_all(multiply_rows_with_avx2, 2)
_multiply_amx = _make_multiply_all(multiply_rows_with_amx, 1)


@device_function
def _round_rows(product: _Product, inputs: int, values: Any, offset: Any) -> _Product:
    """Return the product with rounded inputs, for one with `values` that are not rounded.

    Each thread rounds a few rows for itself, which takes less time than another kernel.
    """
    rows = len(product.row_scales)
    x = floats(product.values, (rows, inputs))
    scales = np.empty(rows, np.float32)
    for row in range(rows):
        scales[row] = quantize_row(x[row], values[row], offset)
    return _Product(
        np.int64(values.ctypes.data),
        scales,
        product.panels,
        product.scales,
        product.is_scaled,
        product.corrections,
        product.out,
        product.depth,
        product.initial,
        product.initial_stride,
    )


def _round_and_multiply_with_vnni(arguments: Any) -> None:
    product = _unpack(arguments)
    values = np.empty((len(product.row_scales), product.depth), np.uint8)
    inputs = numba.carray(arguments, 14)[13]
    _multiply_vnni(arguments, _round_rows(product, inputs, values, np.int32(OFFSET)))
    values[0, 0] = (
        0  # numba frees an array after its own last use, even if its address is used later
    )


def _round_and_multiply_with_avx2(arguments: Any) -> None:
    product = _unpack(arguments)
    values = np.empty((len(product.row_scales), product.depth), np.int16)
    inputs = numba.carray(arguments, 14)[13]
    _multiply_avx2(arguments, _round_rows(product, inputs, values, np.int32(0)))
    values[0, 0] = (
        0  # numba frees an array after its own last use, even if its address is used later
    )


def _multiply_with_vnni(arguments: Any) -> None:
    _multiply_vnni(arguments, _unpack(arguments))


def _multiply_with_avx2(arguments: Any) -> None:
    _multiply_avx2(arguments, _unpack(arguments))


def _multiply_with_amx(arguments: Any) -> None:
    use_tiles(numba.carray(arguments, 13)[12])
    _multiply_amx(arguments, _unpack(arguments))
    release_tiles()


(
    _quantize_bytes,
    _quantize_int16,
    _few_with_vnni,
    _few_with_avx2,
    _with_vnni,
    _with_avx2,
    _with_amx,
) = (
    functools.cache(functools.partial(ParallelKernel, function))
    for function in (
        _quantize_to_bytes,
        _quantize_to_int16,
        _round_and_multiply_with_vnni,
        _round_and_multiply_with_avx2,
        _multiply_with_vnni,
        _multiply_with_avx2,
        _multiply_with_amx,
    )
)


@dataclass(frozen=True, slots=True)
class Instructions:
    """The kernels for some instructions of a CPU.

    Attributes:
        values: number of values in a row of a panel for each output.
        dtype: dtype of rounded inputs.
        offset: what is added to rounded inputs.
        quantize: returns the kernel that rounds inputs.
        few_rows: returns the kernel that rounds and multiplies fewer rows than `MANY_ROWS`.
        many_rows: returns the kernel that multiplies all others, which are rounded.
    """

    values: int
    dtype: torch.dtype
    offset: int
    quantize: Callable[[], ParallelKernel]
    few_rows: Callable[[], ParallelKernel]
    many_rows: Callable[[], ParallelKernel]


MANY_ROWS = 8
"""The number of rows from which on a separate kernel rounds them, and AMX is faster than VNNI."""

AMX = Instructions(4, torch.uint8, OFFSET, _quantize_bytes, _few_with_vnni, _with_amx)
VNNI = Instructions(4, torch.uint8, OFFSET, _quantize_bytes, _few_with_vnni, _with_vnni)
AVX2 = Instructions(2, torch.int16, 0, _quantize_int16, _few_with_avx2, _with_avx2)


@functools.cache
def supported_instructions() -> Sequence[Instructions]:
    """Return what this CPU supports, the fastest first."""
    supported = [AVX2]
    if _VNNI:
        supported.insert(0, VNNI)
        if has_amx("int8"):
            supported.insert(0, AMX)
    return supported
