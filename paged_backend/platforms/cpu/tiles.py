"""The inner loop of all CPU kernels: a small matrix product in vector registers.

numba compiles it for the instructions of the machine (AVX2, AVX-512), so no C compiler is needed.
Every result is the sum over the depth in order, one fused multiply-add after the other, regardless
of the other rows. So the numbers of a token do not depend on its batch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_backend.platforms.cpu.threads import device_function

LANES = 16  # columns of a tile
_NARROW_LANES = 8
_ROWS = 6  # rows of a full tile: 6 x 16 sums fill the vector registers of AVX2
_FLOAT = ir.FloatType()
_INT64 = ir.IntType(64)


def _emit_tile(builder: Any, rows: int, lanes: int, args: Any) -> None:
    """Emit C = A @ B, or C += A @ B, with the sums in registers over the whole depth."""
    vector = ir.VectorType(_FLOAT, lanes)
    splat_mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
    )
    a, a_stride, b, b_stride, c, c_stride, depth, add = args
    a, b, c = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in (a, b, c))

    def at(base: Any, stride: Any, index: Any) -> Any:
        return builder.gep(base, [builder.mul(stride, index)])

    def vector_at(base: Any, stride: Any, index: Any) -> Any:
        return builder.bitcast(at(base, stride, index), vector.as_pointer())

    a_rows = [at(a, a_stride, _INT64(row)) for row in range(rows)]
    c_rows = [vector_at(c, c_stride, _INT64(row)) for row in range(rows)]
    sums = [cgutils.alloca_once_value(builder, vector([0.0] * lanes)) for _ in range(rows)]
    with builder.if_then(builder.icmp_signed("!=", add, _INT64(0))):
        for total, c_row in zip(sums, c_rows, strict=True):
            builder.store(builder.load(c_row, align=4), total)
    with cgutils.for_range(builder, depth) as loop:
        b_row = builder.load(vector_at(b, b_stride, loop.index), align=4)
        for total, a_row in zip(sums, a_rows, strict=True):
            value = builder.load(builder.gep(a_row, [loop.index]))
            lane = builder.insert_element(undefined, value, ir.IntType(32)(0))
            splat = builder.shuffle_vector(lane, undefined, splat_mask)
            builder.store(builder.call(fma, [splat, b_row, builder.load(total)]), total)
    for total, c_row in zip(sums, c_rows, strict=True):
        builder.store(builder.load(total), c_row, align=4)


def _tile_function(module: Any, rows: int, lanes: int) -> Any:
    """One shared function per tile size; inlining it everywhere slows compilation."""
    function = cgutils.get_or_insert_function(
        module, ir.FunctionType(ir.VoidType(), [_INT64] * 8), f"paged_tile_{rows}x{lanes}"
    )
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        _emit_tile(builder, rows, lanes, function.args)
        builder.ret_void()
    return function


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]  # numba has no types
def _multiply_columns(
    context: Any,
    lanes: Any,
    rows: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    depth: Any,
    add: Any,
) -> Any:
    """C[rows, lanes] = A[rows, depth] @ B[depth, lanes], for up to _ROWS rows; see `multiply`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        done = builder.append_basic_block()
        switch = builder.switch(args[1], done)
        for height in range(1, _ROWS + 1):
            block = builder.append_basic_block()
            switch.add_case(_INT64(height), block)
            with builder.goto_block(block):
                tile = _tile_function(builder.module, height, lanes.literal_value)
                builder.call(tile, args[2:])
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(lanes, *[types.int64] * 9), generate


@device_function
def multiply(
    rows: int,
    columns: int,
    a: int,
    a_stride: int,
    b: int,
    b_stride: int,
    c: int,
    c_stride: int,
    depth: int,
    add: int,
) -> None:
    """C[rows, columns] = A[rows, depth] @ B[depth, columns], plus what C held if `add` is 1.

    `a`, `b` and `c` are addresses of float32 values; strides count values. `columns` is a multiple
    of 8.
    """
    tiles = (rows + _ROWS - 1) // _ROWS
    first = 0
    for tile in range(tiles):
        last = (tile + 1) * rows // tiles
        a_tile = a + first * a_stride * 4
        c_tile = c + first * c_stride * 4
        for column in range(0, columns - LANES + 1, LANES):
            _multiply_columns(
                LANES,
                last - first,
                a_tile,
                a_stride,
                b + column * 4,
                b_stride,
                c_tile + column * 4,
                c_stride,
                depth,
                add,
            )
        if columns % LANES:
            column = columns - _NARROW_LANES
            _multiply_columns(
                _NARROW_LANES,
                last - first,
                a_tile,
                a_stride,
                b + column * 4,
                b_stride,
                c_tile + column * 4,
                c_stride,
                depth,
                add,
            )
        first = last
