"""Products of tiles on the AMX units of a CPU: bf16 with float32 sums, int8 with int32 sums.

A float32 matrix is nearly the sum of two bf16 matrices, its parts. The product of two such sums is
that of three pairs of parts; the product of the smaller ones is left out. The method is that of
Henry, Tang and Heinecke: "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations", 2019.

llvmlite emits the instructions, so no C compiler is needed. A tile register holds 16 rows of 64
bytes. Each result is a sum over the depth in a fixed order, regardless of the other rows. So the
numbers of a token do not depend on its batch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_backend.platforms.cpu.llvm import INT64, call_one, shared_function
from paged_backend.platforms.cpu.threads import device_function
from paged_backend.platforms.cpu.tiles import emit_prefetch

ROWS = 16  # rows of a tile
LANES = 16  # columns of a panel
DEPTH = 32  # bf16 values in a row of a tile
TILE_BYTES = 1024  # bytes of a tile
_SIZES = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))  # sizes of a result in tiles: rows, columns
_SIZES_OF_PARTS = ((1, 1), (1, 2), (2, 1), (2, 2))
_ONE_PRODUCT = ((0, 0),)
_PRODUCTS_OF_PARTS = ((1, 0), (0, 0), (0, 1))  # parts of A and B; the largest part is 0
_PREFETCH_BYTES = 2 * TILE_BYTES  # distance from a loaded tile of B to the prefetched one
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


class _TileProduct(NamedTuple):
    """What tile functions differ in."""

    instruction: str
    products: tuple[tuple[int, int], ...] = _ONE_PRODUCT  # pairs of parts of A and B, in order
    streams: bool = False  # B comes from memory, so it is prefetched


def _emit(builder: Any, product: _TileProduct, row_tiles: int, panels: int, args: Any) -> None:
    """Emit C = A @ B for some rows and panels, plus what the sums, which are tiles, begin with.

    The parts of A and of B, if there are several, follow each other in each row and panel.
    """
    a, a_stride, b, panel_stride, c, c_stride, steps, initial, initial_stride = args
    has_initial = builder.icmp_signed("!=", initial, INT64(0))
    a, b, c, initial = (builder.inttoptr(address, _POINTER) for address in (a, b, c, initial))

    run = functools.partial(emit_instruction, builder)

    def at(base: Any, stride: Any, index: int) -> Any:
        return builder.gep(base, [builder.mul(stride, INT64(index))])

    sums = [[_INT8(i * panels + j) for j in range(panels)] for i in range(row_tiles)]
    a_tiles = [_INT8(row_tiles * panels + i) for i in range(row_tiles)]
    # A part of B that two products read stays in tiles; with 2 x 2 sums that takes all eight.
    num_b_tiles = 1 if product.products == _ONE_PRODUCT else panels
    b_tiles = [_INT8(row_tiles * (panels + 1) + j) for j in range(num_b_tiles)]

    def move_sums(name: str, base: Any, stride: Any) -> None:
        for i in range(row_tiles):
            for j in range(panels):
                place = builder.gep(at(base, stride, ROWS * i), [INT64(j * LANES * 4)])
                run(name, sums[i][j], place, stride)

    with builder.if_else(has_initial) as (loads, clears):
        with loads:
            move_sums("tileloadd64", initial, initial_stride)
        with clears:
            for total in (total for row in sums for total in row):
                run("tilezero", total)
    with cgutils.for_range(builder, steps) as loop:
        a_bytes, b_bytes = INT64(2 * DEPTH), INT64(TILE_BYTES)
        a_step, b_step = (
            builder.gep(base, [builder.mul(loop.index, size)])
            for base, size in ((a, a_bytes), (b, b_bytes))
        )
        loaded: tuple[int, ...] = (-1, -1)
        for parts in product.products:
            a_part = at(a_step, builder.mul(steps, a_bytes), parts[0])
            b_part = at(b_step, builder.mul(steps, b_bytes), parts[1])
            for i, tile in enumerate(a_tiles):
                if parts[0] != loaded[0]:
                    run("tileloadd64", tile, at(a_part, a_stride, ROWS * i), a_stride)
            for j in range(panels):
                b_tile = b_tiles[j % num_b_tiles]
                if parts[1] != loaded[1]:
                    place = at(b_part, panel_stride, j)
                    run("tileloadd64", b_tile, place, INT64(2 * DEPTH))
                    if product.streams:
                        for line in range(0, TILE_BYTES, 2 * DEPTH):
                            ahead = INT64(_PREFETCH_BYTES + line)
                            emit_prefetch(builder, builder.gep(place, [ahead]))
                for i, tile in enumerate(a_tiles):
                    run(product.instruction, sums[i][j], tile, b_tile)
            loaded = parts
    move_sums("tilestored64", c, c_stride)


def _tile_function(module: Any, product: _TileProduct, row_tiles: int, panels: int) -> Any:
    return shared_function(
        module,
        f"paged_{product.instruction}_{len(product.products)}{'s' * product.streams}_"
        f"{row_tiles}x{panels}",
        9,
        lambda builder, args: _emit(builder, product, row_tiles, panels, args),
    )


def _make_multiply_tile(product: _TileProduct, sizes: Sequence[tuple[int, int]] = _SIZES) -> Any:
    """Return the intrinsic that multiplies one or two tiles of rows by some panels.

    multiply_tile(row_tiles, panels, a, a_stride, b, panel_stride, c, c_stride, steps, initial,
    initial_stride) takes addresses and strides in bytes; `initial` is that of what the sums begin
    with, or 0. `use_tiles` must have been called.
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
        initial: Any,
        initial_stride: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            tiles = {
                row_tiles * 8 + panels: _tile_function(builder.module, product, row_tiles, panels)
                for row_tiles, panels in sizes
            }
            tile = builder.add(builder.mul(args[0], INT64(8)), args[1])
            call_one(builder, tile, tiles, args[2:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return multiply_tile


multiply_bf16_tile = _make_multiply_tile(_TileProduct(_BF16))
"""Multiply tiles of bf16 values; the result is float32."""

stream_bf16_tile = _make_multiply_tile(_TileProduct(_BF16, streams=True))
"""Multiply the same for a weight that comes from memory, not from a cache."""

multiply_parts_tile = _make_multiply_tile(_TileProduct(_BF16, _PRODUCTS_OF_PARTS), _SIZES_OF_PARTS)
"""Multiply tiles of float32 values in two parts, up to two panels at once."""

multiply_int8_tile = _make_multiply_tile(_TileProduct(_INT8_TILES))
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
def panels_at_once(row_tiles: int, left: int) -> Any:
    """Return the number of panels, of those that are left, for one call of a tile function."""
    count = min(4 // row_tiles, left)
    return 2 if count == 3 else count


TILE_CONFIG = tile_config([2 * DEPTH] * 8, [ROWS] * 8)
"""The configuration of the tiles for the tile functions."""
