"""The one inner loop of all CPU kernels: a small matrix product held in vector registers.

numba compiles it to whatever the machine has (AVX2, AVX-512), so no C compiler is needed. Each
result is the sum over the depth in order, one fused multiply-add after the other, whichever rows
are computed beside it: a token's numbers do not depend on the batch that it is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import torch  # noqa: F401  first, so that numba's threads are those of the OpenMP torch loads
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

numba.config.THREADING_LAYER = "omp"

P = ParamSpec("P")
R = TypeVar("R")

ROWS = 6  # rows of a full tile: with 16 columns they fill the registers of AVX2
_FLOAT = ir.FloatType()


def compiled(*, parallel: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: compile a function to machine code, kept on disk for the next process."""
    jit = numba.njit(parallel=parallel, cache=True, nogil=True, fastmath=True, error_model="numpy")
    return cast(Callable[[Callable[P, R]], Callable[P, R]], jit)


@intrinsic(prefer_literal=True)
def _tile(
    context: Any,
    rows: Any,
    columns: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
    depth: Any,
    add: Any,
) -> Any:
    """Emit C[rows, columns] = A[rows, depth] @ B[depth, columns], plus C before if `add`.

    Addresses and strides are integers, in bytes and in elements; `rows` and `columns` literals.
    """
    num_rows, width = rows.literal_value, columns.literal_value
    vector = ir.VectorType(_FLOAT, width)
    first_lane = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, a, a_stride, b, b_stride, c, c_stride, depth, add = args
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{width}f32"
        )
        a, b, c = (builder.inttoptr(x, _FLOAT.as_pointer()) for x in (a, b, c))
        sums = [cgutils.alloca_once(builder, vector) for _ in range(num_rows)]

        def row_of(base: Any, stride: Any, row: int) -> Any:
            return builder.gep(base, [builder.mul(stride, stride.type(row))])

        def as_vector(address: Any) -> Any:
            return builder.bitcast(address, vector.as_pointer())

        a_rows = [row_of(a, a_stride, row) for row in range(num_rows)]
        c_rows = [as_vector(row_of(c, c_stride, row)) for row in range(num_rows)]
        with builder.if_else(add) as (then, otherwise):
            with then:
                for total, out in zip(sums, c_rows, strict=True):
                    builder.store(builder.load(out, align=4), total)
            with otherwise:
                for total in sums:
                    builder.store(ir.Constant(vector, [0.0] * width), total)
        with cgutils.for_range(builder, depth) as loop:
            b_row = builder.load(
                as_vector(builder.gep(b, [builder.mul(loop.index, b_stride)])), align=4
            )
            for a_row, total in zip(a_rows, sums, strict=True):
                value = builder.load(builder.gep(a_row, [loop.index]), align=4)
                lane = builder.insert_element(
                    ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0)
                )
                splat = builder.shuffle_vector(
                    lane, ir.Constant(vector, ir.Undefined), first_lane
                )
                builder.store(builder.call(fma, [splat, b_row, builder.load(total)]), total)
        for total, out in zip(sums, c_rows, strict=True):
            builder.store(builder.load(total), out, align=4)
        return context.get_dummy_value()

    int64 = types.int64
    signature = types.void(
        rows, columns, int64, int64, int64, int64, int64, int64, int64, types.boolean
    )
    return signature, generate
