"""The formats of stored keys and values on the CPU: how a number is stored, and loaded as float32.

`platforms.torch.kv_pool` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from paged_backend.platforms.cpu.threads import device_function, exact_function
from paged_backend.platforms.cpu.tiles import Float32, make_multiply

_INT8, _INT16, _INT32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_FLOAT16, _FLOAT32 = ir.HalfType(), ir.FloatType()
_FP8_LARGEST = np.float32(448.0)
_FP8_NORMAL = np.float32(2.0**-6)  # the smallest normal number
_FP8_STEPS = np.float32(2.0**9)  # numbers below are multiples of 1 / this
_FP8_BIAS = 120 << 3  # the difference of the exponents' biases, in stored numbers


class BFloat16(Float32):
    """Products of float32 values and bfloat16 values; see `Arithmetic`."""

    name = "f32_bf16"

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """See `Arithmetic.load`."""
        words = builder.zext(_load(builder, address, _INT16, lanes), ir.VectorType(_INT32, lanes))
        shift = ir.Constant(words.type, [16] * lanes)
        return builder.bitcast(builder.shl(words, shift), ir.VectorType(_FLOAT32, lanes))


class Int8(Float32):
    """Products of float32 values and int8 values; see `Arithmetic`."""

    name = "f32_int8"

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """See `Arithmetic.load`."""
        numbers = _load(builder, address, _INT8, lanes)
        words = builder.sext(numbers, ir.VectorType(_INT32, lanes))
        return builder.sitofp(words, ir.VectorType(_FLOAT32, lanes))


class Float8(Float32):
    """Products of float32 values and float8_e4m3fn values / 256; see `Arithmetic`.

    A float16 has the same fields, with a larger exponent: its bias is 15, not 7.
    """

    name = "f32_fp8"

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """See `Arithmetic.load`."""
        words = builder.sext(_load(builder, address, _INT8, lanes), ir.VectorType(_INT16, lanes))
        fields = builder.shl(words, ir.Constant(words.type, [7] * lanes))
        # The sign was extended to bit 15 and to bit 14, which belongs to the exponent.
        bits = builder.and_(fields, ir.Constant(words.type, [0xBFFF - 0x10000] * lanes))
        half = builder.bitcast(bits, ir.VectorType(_FLOAT16, lanes))
        return builder.fpext(half, ir.VectorType(_FLOAT32, lanes))


def _load(builder: Any, address: Any, kind: Any, lanes: int) -> Any:
    vector = ir.VectorType(kind, lanes).as_pointer()
    return builder.load(builder.bitcast(address, vector), align=1)


@exact_function
def quotient(dividend: Any, divisor: Any) -> Any:
    """Divide; fast math would multiply with a reciprocal."""
    return dividend / divisor


@device_function
def _to_float32(x: Any, scale: Any) -> Any:
    return x


@device_function
def _to_bfloat16(x: Any, scale: Any) -> Any:
    bits = np.float32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@device_function
def _to_int8(x: Any, scale: Any) -> Any:
    return np.int8(np.int32(np.rint(quotient(x, scale))))


@device_function
def _to_float8(x: Any, scale: Any) -> Any:
    y = quotient(x, scale)
    size = np.float32(min(abs(y), _FP8_LARGEST))
    sign = np.uint32(128) if y < 0 else np.uint32(0)
    if size < _FP8_NORMAL:
        return np.uint8(np.uint32(np.rint(size * _FP8_STEPS)) | sign)
    bits = size.view(np.uint32)
    odd = (bits >> np.uint32(20)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    return np.uint8((rounded - np.uint32(_FP8_BIAS)) | sign)


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """One format.

    Attributes:
        name: part of the names of the compiled functions; unique to the format.
        number: the numpy type of a stored number; its bytes count.
        convert: a device function that returns the stored number for a number and a scale.
        multiply: see `make_multiply`; B has stored numbers, and strides count words of 4 bytes.
        factor: B times this is the stored number.
        largest: the largest stored number; None if there are no scales.
    """

    name: str
    number: Any
    convert: Callable[..., Any]
    multiply: Callable[..., Any]
    factor: float = 1.0
    largest: float | None = None


FLOAT32 = StoredNumbers("float32", np.float32, _to_float32, make_multiply(Float32()))
BFLOAT16 = StoredNumbers("bfloat16", np.uint16, _to_bfloat16, make_multiply(BFloat16()))
INT8 = StoredNumbers("int8", np.int8, _to_int8, make_multiply(Int8()), largest=127.0)
FLOAT8 = StoredNumbers(
    "float8", np.uint8, _to_float8, make_multiply(Float8()), factor=256.0, largest=448.0
)

STORED_NUMBERS = {
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FLOAT8,
}
"""The formats by the dtype of the pool."""
