"""The arithmetic of int8 products with exact int32 sums, for the instructions of a CPU.

VNNI and AMX multiply unsigned by signed bytes, four at a time. So a row holds values plus 128,
and 128 times the sum of the weights is subtracted from each result. AVX2 multiplies pairs of int16.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

_INT8, _INT16, _INT32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


class Vnni:
    """Four bytes in a word; see :class:`~paged_backend.platforms.cpu.tiles.Arithmetic`.

    Args:
        lanes: words in a register: 16 with AVX-512, 8 with AVX-VNNI.
    """

    word = _INT32

    def __init__(self, lanes: int) -> None:
        self.name = f"vnni{lanes}"
        self._lanes = lanes

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """See `Arithmetic.load`."""
        kind = ir.VectorType(_INT32, lanes).as_pointer()
        return builder.load(builder.bitcast(address, kind), align=4)

    def multiply_add(self, builder: Any, total: Any, a: Any, b: Any) -> Any:
        """See `Arithmetic.multiply_add`."""
        lanes = min(self._lanes, total.type.count)
        vector = ir.VectorType(_INT32, lanes)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [vector] * 3),
            f"llvm.x86.avx512.vpdpbusd.{32 * lanes}",
        )
        parts = zip(*(_split(builder, value, lanes) for value in (total, a, b)), strict=True)
        return _join(builder, [builder.call(function, part) for part in parts])


class Avx2:
    """Two int16 in a word of A, two int8 in half a word of B.

    See :class:`~paged_backend.platforms.cpu.tiles.Arithmetic`.
    """

    name = "avx2"
    word = _INT32

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """See `Arithmetic.load`."""
        kind = ir.VectorType(_INT8, 2 * lanes)
        pairs = builder.load(builder.bitcast(address, kind.as_pointer()), align=2)
        return builder.sext(pairs, ir.VectorType(_INT16, 2 * lanes))

    def multiply_add(self, builder: Any, total: Any, a: Any, b: Any) -> Any:
        """See `Arithmetic.multiply_add`."""
        words, pairs = ir.VectorType(_INT32, 8), ir.VectorType(_INT16, 16)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(words, [pairs, pairs]), "llvm.x86.avx2.pmadd.wd"
        )
        a_parts = [builder.bitcast(part, pairs) for part in _split(builder, a, 8)]
        products = [
            builder.call(function, [x, y])
            for x, y in zip(a_parts, _split(builder, b, 16), strict=True)
        ]
        return builder.add(total, _join(builder, products))


def _split(builder: Any, value: Any, size: int) -> list[Any]:
    """Emit the parts of a vector that have a size; a vector of this size is the only part."""
    count = value.type.count
    if count == size:
        return [value]
    masks = [list(range(start, start + size)) for start in range(0, count, size)]
    return [builder.shuffle_vector(value, value, _mask(mask)) for mask in masks]


def _join(builder: Any, parts: list[Any]) -> Any:
    """Emit the vector of one part or of two parts."""
    if len(parts) == 1:
        return parts[0]
    return builder.shuffle_vector(*parts, _mask(list(range(2 * parts[0].type.count))))


def _mask(indexes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_INT32, len(indexes)), indexes)
