"""Products of linear layers on the AMX units of a CPU: bf16 with float32 sums.

A weight may have one part or two; see `amx`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numba
import numpy as np

from paged_backend.checkpoint.shape import Activation
from paged_backend.platforms.cpu import amx
from paged_backend.platforms.cpu.amx import (
    DEPTH,
    LANES,
    ROWS,
    TILE_BYTES,
    TILE_CONFIG,
    multiply_bf16_tile,
    multiply_parts_tile,
    panels_at_once,
    release_tiles,
    stream_bf16_tile,
    use_tiles,
)
from paged_backend.platforms.cpu.gated import index_of, make_gate
from paged_backend.platforms.cpu.in_place import Initial
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_function,
    floats,
)
from paged_backend.platforms.cpu.vectors import store_bfloat16

_WIDTH = 4 * LANES  # columns of a piece of work
_BLOCK_ROWS = 512  # rows of a piece; more would leave the cache before the next columns read them


class Matrix(NamedTuple):
    """A matrix in memory."""

    address: Any
    stride: Any  # bytes from a row to the next one


@device_function
def _copy(shape: Any, source: Matrix, target: Matrix) -> None:
    """Copy floats."""
    rows, columns = shape
    for row in range(rows):
        values = floats(source.address + row * source.stride, columns)
        place = floats(target.address + row * target.stride, columns)
        for i in range(columns):
            place[i] = values[i]


@device_function
def multiply_block(
    parts: int,
    row_tiles: int,
    num_panels: int,
    x: Matrix,
    panels: Matrix,
    result: Matrix,
    before: Matrix,
    streams: bool,
) -> None:
    """Multiply one or two tiles of rows by some panels.

    Args:
        parts: parts of each number, 1 or 2.
        row_tiles: 1 or 2.
        num_panels: up to 4.
        x: the rows.
        panels: each of its rows is a panel.
        result: where the product goes.
        before: what the sums begin with; its address is 0 for zeros.
        streams: the panels come from memory, not from a cache.
    """
    panel = 0
    while panel < num_panels:
        count = panels_at_once(max(parts, row_tiles), num_panels - panel)
        shift = panel * LANES * 4
        begin = before.address
        if begin != 0:
            begin += shift
        weights = panels.address + panel * panels.stride
        if parts == 1 and streams:
            stream_bf16_tile(
                *(row_tiles, count, x.address, x.stride, weights, panels.stride),
                *(result.address + shift, result.stride, panels.stride // TILE_BYTES),
                *(begin, before.stride),
            )
        elif parts == 1:
            multiply_bf16_tile(
                *(row_tiles, count, x.address, x.stride, weights, panels.stride),
                *(result.address + shift, result.stride, panels.stride // TILE_BYTES),
                *(begin, before.stride),
            )
        else:
            multiply_parts_tile(
                *(row_tiles, count, x.address, x.stride, weights, panels.stride),
                *(result.address + shift, result.stride, panels.stride // (2 * TILE_BYTES)),
                *(begin, before.stride),
            )
        panel += count


def _multiply_panels(arguments: Any) -> None:
    """Compute some rows of the columns that belong to some panels, then the next ones."""
    words = numba.carray(arguments, 11)
    x, panels, out, rows, columns, steps, initial = words[2:9]
    parts = words[10]
    panel_stride, x_stride = parts * steps * TILE_BYTES, parts * steps * (2 * DEPTH)
    memory = np.empty((2 * ROWS, _WIDTH), np.float32)  # results of partly filled tiles
    edge = Matrix(np.int64(memory.ctypes.data), np.int64(_WIDTH * 4))
    use_tiles(words[1])
    num_columns = (columns + _WIDTH - 1) // _WIDTH
    num_pieces = num_columns * ((rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS)
    piece = claim(arguments)
    while piece < num_pieces:
        first, column = piece // num_columns * _BLOCK_ROWS, piece % num_columns * _WIDTH
        num_panels = min(_WIDTH // LANES, (columns - column + LANES - 1) // LANES)
        weights = Matrix(panels + column // LANES * panel_stride, panel_stride)
        for row in range(first, min(first + _BLOCK_ROWS, rows), 2 * ROWS):
            row_tiles = 2 if rows - row > ROWS else 1
            place = Matrix(out + (row * columns + column) * 4, columns * 4)
            before = Matrix(initial, words[9] * 4)
            if initial != 0:
                before = Matrix(initial + row * before.stride + column * 4, before.stride)
            shape = min(2 * ROWS, rows - row), min(_WIDTH, columns - column)
            is_whole = shape[0] == row_tiles * ROWS and shape[1] == num_panels * LANES
            source, streams = Matrix(x + row * x_stride, x_stride), row == first
            if is_whole:
                multiply_block(
                    *(parts, row_tiles, num_panels, source, weights, place, before, streams)
                )
            else:
                if initial != 0:
                    _copy(shape, before, edge)
                    before = edge
                multiply_block(
                    *(parts, row_tiles, num_panels, source, weights, edge, before, streams)
                )
                _copy(shape, edge, place)
        piece = claim(arguments)
    memory[0, 0] = (
        0  # numba frees an array after its own last use, even if its address is used later
    )
    release_tiles()


_gate = make_gate("bfloat16", np.uint16, store_bfloat16)


def _multiply_gated(arguments: Any) -> None:
    """Compute some rows of the columns that belong to pairs of panels, then the next ones."""
    words = numba.carray(arguments, 11)
    x, panels, out_at, rows, columns, steps, initial = words[2:9]
    panel_stride, x_stride = steps * TILE_BYTES, steps * (2 * DEPTH)
    memory = np.empty((2 * ROWS, _WIDTH), np.float32)
    sums = Matrix(np.int64(memory.ctypes.data), np.int64(_WIDTH * 4))
    use_tiles(words[1])
    num_columns = columns // (_WIDTH // 2)
    num_pieces = num_columns * ((rows + _BLOCK_ROWS - 1) // _BLOCK_ROWS)
    piece = claim(arguments)
    while piece < num_pieces:
        first, column = piece // num_columns * _BLOCK_ROWS, piece % num_columns * (_WIDTH // 2)
        weights = Matrix(panels + column // LANES * 2 * panel_stride, panel_stride)
        for row in range(first, min(first + _BLOCK_ROWS, rows), 2 * ROWS):
            row_tiles = 2 if rows - row > ROWS else 1
            num_rows = min(2 * ROWS, rows - row)
            before = Matrix(initial, words[9] * 4)
            if initial != 0:
                place = initial + row * before.stride + column * 2 * 4
                _copy((num_rows, _WIDTH), Matrix(place, before.stride), sums)
                before = sums
            source = Matrix(x + row * x_stride, x_stride)
            multiply_block(
                *(1, row_tiles, _WIDTH // LANES, source, weights, sums, before, row == first)
            )
            size = num_rows, _WIDTH // (2 * LANES)
            out = out_at + (row * columns + column) * 2
            _gate(sums.address, _WIDTH, out, columns, size, words[10])
        piece = claim(arguments)
    memory[0, 0] = 0  # see `_multiply_panels`
    release_tiles()


@functools.cache
def _kernels() -> tuple[ParallelKernel, ParallelKernel]:
    if not amx.has_amx():  # the first instruction would end the process
        raise RuntimeError("this CPU has no AMX with bf16, or the kernel does not allow it")
    return ParallelKernel(_multiply_panels), ParallelKernel(_multiply_gated)


def multiply_panels(
    x: int,
    panels: int,
    out: int,
    rows: int,
    columns: int,
    steps: int,
    initial: Initial,
    parts: int = 1,
) -> None:
    """C = A @ B, plus what the sums begin with, for the addresses of A, B and C.

    Args:
        x: A [rows, parts, steps * DEPTH] bf16; the rows up to a multiple of ROWS are read, too.
        panels: B in panels [columns / LANES, parts, steps, DEPTH / 2, LANES, 2] bf16: pairs of
            values that follow each other in the depth, for each column. The last panel is padded.
        out: C [rows, columns] float32.
        rows: number of rows.
        columns: number of columns.
        steps: the depth in tiles.
        initial: what the sums begin with.
        parts: 1, or 2 where A and B are sums of two matrices.
    """
    multiply, _ = _kernels()
    multiply(TILE_CONFIG.ctypes.data, x, panels, out, rows, columns, steps, *initial, parts)


def multiply_gated(
    x: int,
    panels: int,
    out: int,
    rows: int,
    columns: int,
    steps: int,
    initial: Initial,
    activation: Activation,
) -> None:
    """Compute act(gate) * up in bf16, where gate and up are the halves of a product.

    Args:
        x: see `multiply_panels`.
        panels: the same; panels of gate and up take turns.
        out: address of the result [rows, columns] bf16.
        rows: number of rows.
        columns: number of columns of gate, a multiple of 2 * LANES.
        steps: the depth in tiles.
        initial: what the sums begin with, in the order of the panels.
        activation: activation of the gate.
    """
    _, multiply = _kernels()
    sizes = rows, columns, steps
    multiply(TILE_CONFIG.ctypes.data, x, panels, out, *sizes, *initial, index_of(activation))
