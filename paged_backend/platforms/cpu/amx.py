"""Products on the AMX units of a CPU: bf16 with float32 sums, int8 with int32 sums.

llvmlite emits the instructions, so no C compiler is needed. A tile register holds 16 rows of 64
bytes. Each result is a sum over the depth in a fixed order, regardless of the other rows. So the
numbers of a token do not depend on its batch.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_backend.platforms.cpu.llvm import INT64, call_one, shared_function
from paged_backend.platforms.cpu.threads import ParallelKernel, claim

ROWS = 16  # of a tile
LANES = 16  # columns of a panel
DEPTH = 32  # bf16 values in a row of a tile
_TILE_BYTES = 1024
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


def _tile_config() -> Any:
    """Return the configuration of eight tiles: palette 1, 16 rows of 64 bytes each."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 2 * DEPTH
    config[48:56] = ROWS
    return config


def _emit(builder: Any, instruction: str, row_tiles: int, panels: int, args: Any) -> None:
    """Emit C = A @ B for some rows and panels, with the sums in tiles over the whole depth."""
    config, a, a_stride, b, panel_stride, c, c_stride, steps = args
    a, b, c, config = (builder.inttoptr(address, _POINTER) for address in (a, b, c, config))

    def run(name: str, *arguments: Any) -> None:
        kinds = [argument.type for argument in arguments]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VOID, kinds), f"llvm.x86.{name}"
        )
        builder.call(function, arguments)

    def at(base: Any, stride: Any, index: int) -> Any:
        return builder.gep(base, [builder.mul(stride, INT64(index))])

    sums = [[_INT8(i * panels + j) for j in range(panels)] for i in range(row_tiles)]
    a_tiles = [_INT8(row_tiles * panels + i) for i in range(row_tiles)]
    b_tile = _INT8(row_tiles * panels + row_tiles)
    run("ldtilecfg", config)
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
    for i in range(row_tiles):
        for j in range(panels):
            place = builder.gep(at(c, c_stride, ROWS * i), [INT64(j * LANES * 4)])
            run("tilestored64", sums[i][j], place, c_stride)
    run("tilerelease")


def _tile_function(module: Any, instruction: str, row_tiles: int, panels: int) -> Any:
    return shared_function(
        module,
        f"paged_{instruction}_{row_tiles}x{panels}",
        8,
        lambda builder, args: _emit(builder, instruction, row_tiles, panels, args),
    )


def _make_multiply_tile(instruction: str) -> Any:
    """Return the intrinsic that multiplies one or two tiles of rows by some panels.

    multiply_tile(row_tiles, panels, config, a, a_stride, b, panel_stride, c, c_stride, steps)
    takes addresses and strides in bytes.
    """

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def multiply_tile(
        context: Any,
        row_tiles: Any,
        panels: Any,
        config: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        panel_stride: Any,
        c: Any,
        c_stride: Any,
        steps: Any,
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


def _multiply_panels(arguments: Any) -> None:
    """Compute the columns of the result that belong to some panels, then to the next ones."""
    _, config, x, weights, out, num_row_tiles, num_panels, steps = numba.carray(arguments, 8)
    width = 4 if num_row_tiles == 1 else 2
    panel_stride = steps * _TILE_BYTES
    x_stride, out_stride = steps * (2 * DEPTH), num_panels * (LANES * 4)
    panel = claim(arguments) * width
    while panel < num_panels:
        left = min(width, num_panels - panel)
        while left > 0:
            panels = 4 if left == 4 else min(left, 2)
            row = 0
            while row < num_row_tiles:
                row_tiles = min(2, num_row_tiles - row)
                multiply_bf16_tile(
                    row_tiles,
                    panels,
                    config,
                    x + row * ROWS * x_stride,
                    x_stride,
                    weights + panel * panel_stride,
                    panel_stride,
                    out + row * ROWS * out_stride + panel * LANES * 4,
                    out_stride,
                    steps,
                )
                row += row_tiles
            panel += panels
            left -= panels
        panel = claim(arguments) * width


TILE_CONFIG = _tile_config()
"""The configuration that the tile functions load."""


@functools.cache
def _kernel() -> ParallelKernel:
    if not has_amx():  # the first instruction would end the process
        raise RuntimeError("this CPU has no AMX with bf16, or the kernel does not allow it")
    return ParallelKernel(_multiply_panels)


def multiply_panels(
    x: int, panels: int, out: int, row_tiles: int, num_panels: int, steps: int
) -> None:
    """C = A @ B for the addresses of A, B and C.

    Args:
        x: A [row_tiles * ROWS, steps * DEPTH] bf16.
        panels: B in panels [num_panels, steps, DEPTH / 2, LANES, 2] bf16: pairs of values that
            follow each other in the depth, for each column.
        out: C [row_tiles * ROWS, num_panels * LANES] float32.
        row_tiles: number of tiles of rows.
        num_panels: number of panels.
        steps: the depth in tiles.
    """
    _kernel()(TILE_CONFIG.ctypes.data, x, panels, out, row_tiles, num_panels, steps)
