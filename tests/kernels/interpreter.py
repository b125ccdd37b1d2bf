"""Makes Triton's interpreter honest about bfloat16 and float8.

It keeps bfloat16 as bit patterns and computes on the bits. With `repair`, products are right,
conversions round to nearest as a GPU does (stock ones truncate, to float8 they even lose the
carry), and arithmetic, which kernels here never do in bfloat16, raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
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
        setattr(InterpreterBuilder, name, _refusing(getattr(InterpreterBuilder, name)))


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _widened(value: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(value):
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(original: Any) -> Any:
    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
        return original(self, _widened(a), _widened(b), *others)

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


def _refusing(original: Any) -> Any:
    def operate(self: Any, *operands: Any) -> TensorHandle:
        if any(map(_is_bfloat16, operands)):
            raise TypeError("kernels convert bfloat16 to float32 before they compute with it")
        return original(self, *operands)

    return operate
