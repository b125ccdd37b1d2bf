"""Kernels of experts with int8 weights on a CPU: products of groups of rows with exact int32 sums.

A pair is a row and one of its experts. Rows are rounded pair by pair, so a row's result does not
depend on the other rows of its expert. The last tiles of an expert on AMX units hold pairs of the
next expert, too; their sums are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numba
import numpy as np

from paged_backend.platforms.cpu.amx import release_tiles, use_tiles
from paged_backend.platforms.cpu.int8_kernels import (
    AMX,
    AVX2,
    BLOCK,
    MANY_ROWS,
    OFFSET,
    VNNI,
    WIDTH,
    Instructions,
    multiply_rows_with_amx,
    multiply_rows_with_avx2,
    multiply_rows_with_vnni,
    quantize_row,
    scaled,
)
from paged_backend.platforms.cpu.math import swiglu_row
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    array_at,
    claim,
    claim_rows,
    device_function,
    exact_function,
    float_of,
    floats,
    inlined,
    ints,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES

_NUM_ADDRESSES = 4  # a weight has panels, scales, corrections and biases


class _Group(NamedTuple):
    """The pairs of an expert, and addresses of its weight."""

    first: Any
    count: Any
    panels: Any
    scales: Any  # [columns] float32
    corrections: Any  # [columns] int32, what offsets of the values add to sums
    bias: Any  # [columns] float32


@device_function
def _round_rows(arguments: Any, values: Any, offset: Any) -> None:
    """Round the row of each pair; see `ExpertKernels.quantize`."""
    _, pairs_at, x_at, _, scales_at, num_pairs, depth, size, top_k = numba.carray(arguments, 9)
    pairs, scales = longs(pairs_at, num_pairs), floats(scales_at, num_pairs)
    start, end = claim_rows(arguments, num_pairs)
    while start < end:
        for pair in range(start, end):
            row = floats(x_at + pairs[pair] // top_k * size * 4, size)
            scales[pair] = quantize_row(row, values[pair], offset)
        start, end = claim_rows(arguments, num_pairs)


def _quantize_to_bytes(arguments: Any) -> None:
    words = numba.carray(arguments, 9)
    values = array_at(words[3], (words[5], words[6]), np.uint8)
    _round_rows(arguments, values, np.int32(OFFSET))


def _quantize_to_int16(arguments: Any) -> None:
    words = numba.carray(arguments, 9)
    values = array_at(words[3], (words[5], words[6]), np.int16)
    _round_rows(arguments, values, np.int32(0))


@device_function
def _round_activations(arguments: Any, values: Any, offset: Any) -> None:
    """Round the activation of each pair; see `ExpertKernels.activate`."""
    words = numba.carray(arguments, 12)
    numbers_at, _, scales_at, num_pairs, _, inner, is_plain = words[1:8]
    alpha, limit = float_of(words[8]), float_of(words[9])
    up_offset, cubic = float_of(words[10]), float_of(words[11])
    scales, activated = floats(scales_at, num_pairs), np.empty(inner, np.float32)
    start, end = claim_rows(arguments, num_pairs)
    while start < end:
        for pair in range(start, end):
            if is_plain:
                up = floats(numbers_at, (num_pairs, inner))[pair]
                for i in range(inner):
                    value = max(up[i], np.float32(0.0))
                    activated[i] = value * value
            else:
                gate_up = floats(numbers_at, (num_pairs, 2, inner))[pair]
                swiglu_row(gate_up, activated, alpha, limit, up_offset, cubic)
            scales[pair] = quantize_row(activated, values[pair], offset)
        start, end = claim_rows(arguments, num_pairs)


def _activate_to_bytes(arguments: Any) -> None:
    words = numba.carray(arguments, 12)
    values = array_at(words[2], (words[4], words[5]), np.uint8)
    _round_activations(arguments, values, np.int32(OFFSET))


def _activate_to_int16(arguments: Any) -> None:
    words = numba.carray(arguments, 12)
    values = array_at(words[2], (words[4], words[5]), np.int16)
    _round_activations(arguments, values, np.int32(0))


@exact_function
def _weighted(product: Any, bias: Any, weight: Any) -> Any:
    return (bias + product) * weight


@device_function
def _finish(words: Any, row_scales: Any, group: _Group, block: int, column: int, sums: Any) -> None:
    """Store the scaled sums [rows, columns] of a block of pairs, plus biases.

    With weights, the sums are multiplied by those of their pairs, and stored in the order of the
    batch.
    """
    out_at, num_pairs, columns, pairs_at, weights_at = words[8:13]
    rows, width = sums.shape
    out = floats(out_at, (num_pairs, columns))
    pairs, weights = longs(pairs_at, num_pairs), floats(weights_at, num_pairs)
    scales, bias = floats(group.scales + column * 4, width), floats(group.bias + column * 4, width)
    corrections = ints(group.corrections + column * 4, width)
    for row in range(rows):
        place = group.first + block + row
        row_scale, weight = row_scales[place], np.float32(1.0)
        if weights_at != 0:
            place = pairs[place]
            weight = weights[place]
        for i in range(width):
            product = scaled(sums[row, i] + corrections[i], row_scale, scales[i])
            out[place, column + i] = _weighted(product, bias[i], weight)


def _make_kernel(multiply_few: Any, multiply_many: Any, value_bytes: int) -> Any:
    """Return the device function that computes all pieces of a product of groups.

    A piece is some panels of one expert, and all of its pairs; see `ExpertKernels.multiply`.

    Args:
        multiply_few: multiplies fewer rows than `MANY_ROWS`.
        multiply_many: multiplies all others.
        value_bytes: the size of a rounded input.
    """

    @inlined
    def compute_pieces(arguments: Any) -> None:
        words = numba.carray(arguments, 13)
        values_at, scales_at, weights_at, bounds_at, counts_at, depth = words[1:7]
        num_pairs, columns = words[9], words[10]
        num_groups = longs(counts_at, 2)[1]
        bounds, row_scales = longs(bounds_at, (num_groups, 3)), floats(scales_at, num_pairs)
        pieces = (columns + WIDTH - 1) // WIDTH
        memory = np.empty((BLOCK, WIDTH), np.int32)
        sums_at = np.int64(memory.ctypes.data)
        piece = claim(arguments)
        while piece < num_groups * pieces:
            expert, first, count = bounds[piece // pieces]
            column = piece % pieces * WIDTH
            width = min(WIDTH, columns - column)
            places = longs(weights_at + expert * _NUM_ADDRESSES * 8, _NUM_ADDRESSES)
            panels, scales, corrections, bias = places
            group = _Group(first, count, panels + column * depth, scales, corrections, bias)
            padded = (width + LANES - 1) // LANES * LANES
            for block in range(0, count, BLOCK):
                rows = min(BLOCK, count - block)
                values = values_at + (first + block) * depth * value_bytes
                if rows < MANY_ROWS:
                    multiply_few(values, rows, group.panels, padded, depth, sums_at)
                else:
                    multiply_many(values, rows, group.panels, padded, depth, sums_at)
                _finish(words, row_scales, group, block, column, memory[:rows, :width])
            piece = claim(arguments)

    return compute_pieces


_vnni = _make_kernel(multiply_rows_with_vnni, multiply_rows_with_vnni, 1)
_avx2 = _make_kernel(multiply_rows_with_avx2, multiply_rows_with_avx2, 2)
_amx = _make_kernel(multiply_rows_with_vnni, multiply_rows_with_amx, 1)


# Compiled kernels are kept on the disk by the names of functions of this module.
def _multiply_with_vnni(arguments: Any) -> None:
    _vnni(arguments)


def _multiply_with_avx2(arguments: Any) -> None:
    _avx2(arguments)


def _multiply_with_amx(arguments: Any) -> None:
    use_tiles(numba.carray(arguments, 8)[7])
    _amx(arguments)
    release_tiles()


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """The kernels for some instructions of a CPU, which are compiled when they are first needed.

    The arguments of each are listed after the counter of pieces.

    Attributes:
        quantize: rounds the row of each pair. Addresses of pairs [num_pairs] int64, of rows
            [.., size] float32, of the values [num_pairs, depth] and of their scales [num_pairs]
            float32, then num_pairs, depth, size, and the number of experts of a row.
        activate: rounds the activation of each pair. Addresses of numbers [num_pairs, columns]
            float32 (gate, then up), of the values [num_pairs, depth] and of their scales, then
            num_pairs, depth, the size of an activation, whether there is no gate, so that it is
            max(up, 0) ** 2, and the parameters of an activation.
        multiply: multiplies the values of each expert's pairs by the expert's weight. Addresses of
            values, of scales, of `CpuInt8Linear.addresses` of all experts [num_experts, 4] int64,
            of bounds and of counts (see `Groups`), then depth, the address of the configuration of
            tiles, the address of the result [num_pairs, columns] float32, num_pairs, columns, and
            the addresses of pairs and of their weights [num_pairs] float32. If the last one is not
            0, results are multiplied by the weights, and stored in the order of the batch.
    """

    quantize: Callable[[], ParallelKernel]
    activate: Callable[[], ParallelKernel]
    multiply: Callable[[], ParallelKernel]


(
    _bytes,
    _int16,
    _activated_bytes,
    _activated_int16,
    _with_vnni,
    _with_avx2,
    _with_amx,
) = (
    cache(partial(ParallelKernel, function))
    for function in (
        _quantize_to_bytes,
        _quantize_to_int16,
        _activate_to_bytes,
        _activate_to_int16,
        _multiply_with_vnni,
        _multiply_with_avx2,
        _multiply_with_amx,
    )
)
_KERNELS = {
    AMX: ExpertKernels(_bytes, _activated_bytes, _with_amx),
    VNNI: ExpertKernels(_bytes, _activated_bytes, _with_vnni),
    AVX2: ExpertKernels(_int16, _activated_int16, _with_avx2),
}


def expert_kernels(instructions: Instructions) -> ExpertKernels:
    """Return the kernels of experts for some instructions."""
    return _KERNELS[instructions]
