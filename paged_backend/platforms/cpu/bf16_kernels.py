"""Kernels that round rows to bf16, and multiply them with vector instructions.

The weights have the panels that AMX reads: pairs of values that follow each other in the depth.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

from paged_backend.platforms.cpu.kv_formats import to_bfloat16
from paged_backend.platforms.cpu.linear import make_multiply_panels
from paged_backend.platforms.cpu.threads import ParallelKernel, array_at, claim, floats
from paged_backend.platforms.cpu.tiles import Float32

_INT32, _FLOAT32 = ir.IntType(32), ir.FloatType()
_HAS_PRODUCTS = bool(get_host_cpu_features().get("avx512bf16"))


class _BFloat16(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type of a bf16 number, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


class BFloat16Pairs(Float32):
    """Two bf16 values in a word of A and of B, with float32 sums; see `Arithmetic`.

    Args:
        native: use the instruction of AVX512-BF16, instead of two float32 products.
    """

    def __init__(self, *, native: bool) -> None:
        self.name = "bf16_pairs" if native else "bf16_pairs_f32"
        self._native = native

    def multiply_add(self, builder: Any, total: Any, a: Any, b: Any) -> Any:
        """See `Arithmetic.multiply_add`."""
        lanes = total.type.count
        if not self._native:
            for half in (_low_half, _high_half):
                total = super().multiply_add(builder, total, half(builder, a), half(builder, b))
            return total
        pairs = ir.VectorType(_BFloat16(), 2 * lanes)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(total.type, [total.type, pairs, pairs]),
            f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}",
        )
        return builder.call(function, [total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)])


def _low_half(builder: Any, pairs: Any) -> Any:
    """Emit the first values of pairs, as float32."""
    words = builder.bitcast(pairs, ir.VectorType(_INT32, pairs.type.count))
    shift = ir.Constant(words.type, [16] * pairs.type.count)
    return builder.bitcast(builder.shl(words, shift), pairs.type)


def _high_half(builder: Any, pairs: Any) -> Any:
    """Emit the second values of pairs, as float32."""
    words = builder.bitcast(pairs, ir.VectorType(_INT32, pairs.type.count))
    mask = ir.Constant(words.type, [-(1 << 16)] * pairs.type.count)
    return builder.bitcast(builder.and_(words, mask), pairs.type)


def _round_rows(arguments: Any) -> None:
    """Round rows of float32 to bf16, and pad them with zeros."""
    _, x_at, values_at, rows, inputs, depth = numba.carray(arguments, 6)
    x = floats(x_at, (rows, inputs))
    values = array_at(values_at, (rows, depth), np.uint16)
    row = claim(arguments)
    while row < rows:
        for i in range(inputs):
            values[row, i] = to_bfloat16(x[row, i], np.float32(1.0))
        for i in range(inputs, depth):
            values[row, i] = 0
        row = claim(arguments)


_native_panels = make_multiply_panels(BFloat16Pairs(native=True))
_float32_panels = make_multiply_panels(BFloat16Pairs(native=False))


def _multiply_native(arguments: Any) -> None:
    _native_panels(arguments)


def _multiply_in_float32(arguments: Any) -> None:
    _float32_panels(arguments)


@functools.cache
def rounding_kernel() -> ParallelKernel:
    """Return the kernel that rounds rows to bf16 and pads them with zeros.

    Args of the kernel: the addresses of [rows, inputs] float32 and of [rows, depth] bf16; the
    number of rows, inputs and depth.
    """
    return ParallelKernel(_round_rows)


@functools.cache
def product_kernel(*, native: bool = _HAS_PRODUCTS) -> ParallelKernel:
    """Return the kernel that multiplies rows by panels with vector instructions.

    Its arguments are those of `linear.make_multiply_panels`, with pairs of bf16 as words.

    Args:
        native: use the instruction of AVX512-BF16.
    """
    return ParallelKernel(_multiply_native if native else _multiply_in_float32)
