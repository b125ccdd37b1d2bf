"""Emits the loads, stores and conversions of whole vectors of LANES numbers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, initialize_native_asmparser
from numba.core import cgutils

from paged_backend.platforms.cpu.tiles import LANES

FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)

_FLOAT, _INT32 = FLOATS.element, INTS.element
_WORDS = ir.VectorType(ir.IntType(16), LANES)
_CPU = get_host_cpu_features()


def opaque(builder: Any, vector: Any) -> Any:
    """Return a vector of which LLVM does not know the origin.

    It would store only some lanes of a vector that it has loaded from the same place, and the next
    load would wait for that.
    """
    if not _CPU.get("avx512f"):
        return vector
    signature = ir.FunctionType(FLOATS, [FLOATS])
    return builder.asm(signature, "", "=v,0", [vector], side_effect=False)


def _place(builder: Any, data: Any, vector: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(data, vector.as_pointer()), [index])


def load(builder: Any, data: Any, index: Any) -> Any:
    """Load the vector at an index, counted in vectors from an address."""
    return builder.load(_place(builder, data, FLOATS, index), align=4)


def store_float32(builder: Any, vector: Any, data: Any, index: Any) -> None:
    """Store a vector at an index, counted in vectors from an address."""
    builder.store(vector, _place(builder, data, FLOATS, index), align=4)


def _store_bfloat16(builder: Any, vector: Any, data: Any, index: Any) -> None:
    """Store the nearest bfloat16, of two of them the even one, with one instruction."""
    initialize_native_asmparser()
    signature = ir.FunctionType(_WORDS, [FLOATS])
    instruction = "vcvtneps2bf16 $1, $0"
    rounded = builder.asm(signature, instruction, "=v,v", [vector], side_effect=False)
    builder.store(rounded, _place(builder, data, _WORDS, index), align=2)


def round_to_bfloat16(builder: Any, vector: Any, data: Any, index: Any) -> None:
    """Store the same, on any processor."""
    bits = builder.bitcast(vector, INTS)
    shift, one, half = (ir.Constant(INTS, [number] * LANES) for number in (16, 1, 0x7FFF))
    odd = builder.and_(builder.lshr(bits, shift), one)
    rounded = builder.lshr(builder.add(bits, builder.add(half, odd)), shift)
    builder.store(builder.trunc(rounded, _WORDS), _place(builder, data, _WORDS, index), align=2)


def splat(builder: Any, number: Any) -> Any:
    """Return a vector of copies of a number."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    vector = builder.insert_element(undefined, number, _INT32(0))
    return builder.shuffle_vector(vector, undefined, ir.Constant(INTS, [0] * LANES))


def copies(builder: Any, numbers: Any, index: Any) -> Any:
    """Emit a vector of copies of the float32 at an index from an address."""
    place = builder.gep(builder.inttoptr(numbers, _FLOAT.as_pointer()), [index])
    return splat(builder, builder.load(place, align=4))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c, rounded once."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(FLOATS, [FLOATS] * 3), f"llvm.fma.v{FLOATS.count}f32"
    )
    return builder.call(function, [a, b, c])


def reduce_to_one(builder: Any, operation: str, vector: Any) -> Any:
    """Return the sum or the largest of the numbers of a vector."""
    start: list[Any] = [_FLOAT(0.0)] if operation == "fadd" else []
    kinds = [*(value.type for value in start), FLOATS]
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_FLOAT, kinds),
        f"llvm.vector.reduce.{operation}.v{LANES}f32",
    )
    return builder.call(function, [*start, vector], fastmath=("fast",))


store_bfloat16 = _store_bfloat16 if _CPU.get("avx512bf16") else round_to_bfloat16
"""Store the nearest bfloat16, of two of them the even one."""
