"""Makes Triton's interpreter honest about bfloat16, float8 and overflow.

It keeps bfloat16 as bit patterns and computes on the bits. With `repair`, products are right,
conversions round to nearest as a GPU does (stock ones truncate, to float8 they even lose the
carry), and arithmetic in bfloat16 raises if it rounds, which kernels here never do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def repair() -> None:
    """Patch the interpreter of this process, once."""
    if hasattr(InterpreterBuilder, "bfloat16_repaired"):
        return
    InterpreterBuilder.bfloat16_repaired = True
    np.seterr(over="ignore")  # a GPU overflows to infinity without a word
    InterpreterBuilder.create_dot = _dot(InterpreterBuilder.create_dot)
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(InterpreterBuilder, name, _rounding(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_fp_trunc = lambda self, value, kind: self.cast_impl(value, kind)
    for name in ("binary_op", "unary_op"):
        setattr(InterpreterBuilder, name, _exactly(getattr(InterpreterBuilder, name)))
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


def _check_overflow(self: Any, lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
    """Raise AssertionError if an operation on integers overflows.

    The stock interpreter runs a dozen interpreted operations for this check, which takes a quarter
    of the time of these tests, and ignores the result except in debug mode.
    """
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64:
        return
    exact = _EXACT[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    low, high = kind.get_int_min_value(), kind.get_int_max_value()
    assert low <= exact.min() and exact.max() <= high, (
        f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
    )


_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _widened(value: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(value):
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(original: Any) -> Any:
    """A product with sums of float64, rounded once: no bit of a row depends on the tile's size."""

    def create_dot(
        self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *others: Any
    ) -> TensorHandle:
        a, b = _widened(a), _widened(b)
        if a.data.dtype != np.float32 or d.data.dtype != np.float32:
            return original(self, a, b, d, *others)
        products = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(products + d.data, d.dtype.scalar)

    return create_dot


def _rounding(original: Any) -> Any:
    def convert(self: Any, value: TensorHandle, kind: Any, *others: Any) -> TensorHandle:
        if kind.scalar == tl.float8e4nv:
            return TensorHandle(_float8_codes(value.data), kind.scalar)
        if kind.scalar != tl.bfloat16 or _is_bfloat16(value):
            return original(self, value, kind, *others)
        if value.dtype.scalar.is_fp8():
            value = original(self, value, tl.float32, *others)
        numbers = np.ascontiguousarray(value.data, dtype=np.float32)
        bits = numbers.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded = np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)
        return TensorHandle(rounded.reshape(value.data.shape), tl.bfloat16)

    return convert


def _float8_codes(numbers: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


def _as_float64(value: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(value):
        return value
    return TensorHandle(_widened(value).data.astype(np.float64), tl.float64)


def _exactly(original: Any) -> Any:
    """Compute with bfloat16 where the result is exact, and refuse it elsewhere."""

    def operate(self: Any, *operands: Any) -> TensorHandle:
        handles = [each for each in operands if type(each) is TensorHandle]
        if not any(each.data.dtype == np.uint16 and _is_bfloat16(each) for each in handles):
            return original(self, *operands)
        wide = [_as_float64(each) if type(each) is TensorHandle else each for each in operands]
        found = original(self, *wide)
        if found.data.dtype != np.float64:  # a comparison
            return found
        single = TensorHandle(found.data.astype(np.float32), tl.float32)
        narrow = self.cast_impl(single, tl.bfloat16)
        if not np.array_equal(_widened(narrow).data, found.data, equal_nan=True):
            raise TypeError("kernels convert bfloat16 to float32 before they compute and round")
        return narrow

    return operate
