"""Products on the AMX units of a CPU: bf16 with float32 sums, int8 with int32 sums.

llvmlite emits the instructions, so no C compiler is needed. A tile register holds 16 rows of 64
bytes. Each result is a sum over the depth in a fixed order, regardless of the other rows. So the
numbers of a token do not depend on its batch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_backend.platforms.cpu.llvm import INT64, call_one, shared_function
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_function,
    floats,
)

ROWS = 16  # of a tile
LANES = 16  # columns of a panel
DEPTH = 32  # bf16 values in a row of a tile
_TILE_BYTES = 1024
_WIDTH = 4 * LANES  # columns of a piece of work
_SIZES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))  # of a result in tiles: rows, columns
_BF16, _INT8_TILES = "tdpbf16ps", "tdpbusd"  # the instructions that multiply tiles
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18

_INT8, _VOID = ir.IntType(8), ir.VoidType()
_POINTER = _INT8.as_pointer()


@functools.cache
def has_amx(numbers: str = "bf16") -> bool:
    """Return whether this process may use AMX with bf16 or int8; asks the kernel of Linux for it.

    Args:
        numbers: "bf16" or "int8".
    """
    if not get_host_cpu_features().get(f"amx-{numbers}"):
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)


def tile_config(row_bytes: Sequence[int], rows: Sequence[int]) -> Any:
    """Return a configuration of the eight tiles.

    Args:
        row_bytes: the size of a row of each tile.
        rows: the number of rows of each tile.
    """
    config = np.zeros(64, np.uint8)
    config[0] = 1  # the palette
    config[16:32].view(np.uint16)[:] = row_bytes
    config[48:56] = rows
    return config


def emit_instruction(builder: Any, name: str, *arguments: Any) -> None:
    """Emit an instruction on tiles; tiles are named by constants of 8 bits."""
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VOID, kinds), f"llvm.x86.{name}"
    )
    builder.call(function, arguments)


def _emit(builder: Any, instruction: str, row_tiles: int, panels: int, args: Any) -> None:
    """Emit C = A @ B, or C += A @ B, for some rows and panels, with the sums in tiles."""
    a, a_stride, b, panel_stride, c, c_stride, steps, add = args
    a, b, c = (builder.inttoptr(address, _POINTER) for address in (a, b, c))

    run = functools.partial(emit_instruction, builder)

    def at(base: Any, stride: Any, index: int) -> Any:
        return builder.gep(base, [builder.mul(stride, INT64(index))])

    sums = [[_INT8(i * panels + j) for j in range(panels)] for i in range(row_tiles)]
    a_tiles = [_INT8(row_tiles * panels + i) for i in range(row_tiles)]
    b_tile = _INT8(row_tiles * panels + row_tiles)

    def move_sums(name: str) -> None:
        for i in range(row_tiles):
            for j in range(panels):
                place = builder.gep(at(c, c_stride, ROWS * i), [INT64(j * LANES * 4)])
                run(name, sums[i][j], place, c_stride)

    with builder.if_else(builder.icmp_signed("!=", add, INT64(0))) as (adds, stores):
        with adds:
            move_sums("tileloadd64")
        with stores:
            for total in (total for row in sums for total in row):
                run("tilezero", total)
    with cgutils.for_range(builder, steps) as loop:
        a_step = builder.gep(a, [builder.mul(loop.index, INT64(2 * DEPTH))])
        b_step = builder.gep(b, [builder.mul(loop.index, INT64(_TILE_BYTES))])
        for i, tile in enumerate(a_tiles):
            run("tileloadd64", tile, at(a_step, a_stride, ROWS * i), a_stride)
        for j in range(panels):
            run("tileloadd64", b_tile, at(b_step, panel_stride, j), INT64(2 * DEPTH))
            for i, tile in enumerate(a_tiles):
                run(instruction, sums[i][j], tile, b_tile)
    move_sums("tilestored64")


def _tile_function(module: Any, instruction: str, row_tiles: int, panels: int) -> Any:
    return shared_function(
        module,
        f"paged_{instruction}_{row_tiles}x{panels}",
        8,
        lambda builder, args: _emit(builder, instruction, row_tiles, panels, args),
    )


def _make_multiply_tile(instruction: str) -> Any:
    """Return the intrinsic that multiplies one or two tiles of rows by some panels.

    multiply_tile(row_tiles, panels, a, a_stride, b, panel_stride, c, c_stride, steps, add) takes
    addresses and strides in bytes. `use_tiles` must have been called.
    """

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def multiply_tile(
        context: Any,
        row_tiles: Any,
        panels: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        panel_stride: Any,
        c: Any,
        c_stride: Any,
        steps: Any,
        add: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            tiles = {
                row_tiles * 8 + panels: _tile_function(
                    builder.module, instruction, row_tiles, panels
                )
                for row_tiles, panels in _SIZES
            }
            tile = builder.add(builder.mul(args[0], INT64(8)), args[1])
            call_one(builder, tile, tiles, args[2:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return multiply_tile


multiply_bf16_tile = _make_multiply_tile(_BF16)
"""Multiply tiles of bf16 values; the result is float32."""

multiply_int8_tile = _make_multiply_tile(_INT8_TILES)
"""Multiply tiles of unsigned (A) and signed (B) bytes; the result is int32."""


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def use_tiles(context: Any, config: Any) -> Any:
    """Configure the tiles of this thread, which takes as long as a hundred multiply-adds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_instruction(builder, "ldtilecfg", builder.inttoptr(args[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def release_tiles(context: Any) -> Any:
    """End the use of the tiles, so that the system need not save them for this thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_instruction(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@device_function
def _copy(source: Any, target: Any) -> None:
    """Copy a matrix to the beginning of another one, or the beginning to a smaller matrix."""
    rows, columns = min(len(source), len(target)), min(source.shape[1], target.shape[1])
    for i in range(rows):
        for j in range(columns):
            target[i, j] = source[i, j]


def _multiply_panels(arguments: Any) -> None:
    """Compute the columns of the result that belong to some panels, then to the next ones."""
    _, config, x, panels, out_at, rows, columns, steps, add = numba.carray(arguments, 9)
    out = floats(out_at, (rows, columns))
    panel_stride, x_stride = steps * _TILE_BYTES, steps * (2 * DEPTH)
    edge = np.empty((2 * ROWS, _WIDTH), np.float32)  # for results that do not fill their tiles
    use_tiles(config)
    column = claim(arguments) * _WIDTH
    while column < columns:
        num_panels = min(_WIDTH // LANES, (columns - column + LANES - 1) // LANES)
        for row in range(0, rows, 2 * ROWS):
            row_tiles = 2 if rows - row > ROWS else 1
            place, stride = out_at + (row * columns + column) * 4, columns * 4
            is_edge = row + row_tiles * ROWS > rows or column + num_panels * LANES > columns
            if is_edge:
                place, stride = np.int64(edge.ctypes.data), np.int64(_WIDTH * 4)
                if add:
                    _copy(out[row:, column:], edge)
            panel = 0
            while panel < num_panels:
                count = panels_at_once(row_tiles, num_panels - panel)
                multiply_bf16_tile(
                    *(row_tiles, count, x + row * x_stride, x_stride),
                    *(panels + (column // LANES + panel) * panel_stride, panel_stride),
                    *(place + panel * LANES * 4, stride, steps, add),
                )
                panel += count
            if is_edge:
                _copy(edge, out[row:, column:])
        column = claim(arguments) * _WIDTH
    release_tiles()


@device_function
def panels_at_once(row_tiles: int, left: int) -> Any:
    """Return the number of panels, of those that are left, for one call of a tile function."""
    count = min(4 // row_tiles, left)
    return 2 if count == 3 else count


TILE_CONFIG = tile_config([2 * DEPTH] * 8, [ROWS] * 8)
"""The configuration of the tiles for the tile functions."""


@functools.cache
def _kernel() -> ParallelKernel:
    if not has_amx():  # the first instruction would end the process
        raise RuntimeError("this CPU has no AMX with bf16, or the kernel does not allow it")
    return ParallelKernel(_multiply_panels)


def multiply_panels(
    x: int, panels: int, out: int, rows: int, columns: int, steps: int, add: int
) -> None:
    """C = A @ B, or C += A @ B, for the addresses of A, B and C.

    Args:
        x: A [rows, steps * DEPTH] bf16; the rows up to a multiple of ROWS are read, too.
        panels: B in panels [columns / LANES, steps, DEPTH / 2, LANES, 2] bf16: pairs of values
            that follow each other in the depth, for each column. The last panel is padded.
        out: C [rows, columns] float32.
        rows: number of rows.
        columns: number of columns.
        steps: the depth in tiles.
        add: 1 to add to what C holds, else 0.
    """
    _kernel()(TILE_CONFIG.ctypes.data, x, panels, out, rows, columns, steps, add)
