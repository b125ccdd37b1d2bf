"""The formats of stored keys and values on the CPU: how a number is stored, and loaded as float32.

`platforms.portable.kv_pool` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from paged_backend.platforms.cpu.threads import device_function, exact_function
from paged_backend.platforms.cpu.tiles import Arithmetic, Float32

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


class Float16(Float32):
    """Products of float32 values and float16 values; see `Arithmetic`."""

    name = "f32_f16"

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """See `Arithmetic.load`."""
        half = _load(builder, address, _FLOAT16, lanes)
        return builder.fpext(half, ir.VectorType(_FLOAT32, lanes))


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
def to_bfloat16(x: Any, scale: Any) -> Any:
    """Return the bits of the nearest bfloat16, of two of them the even one."""
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


@device_function
def _key_place(i: int, offset: int, head_dim: int, block_size: int) -> Any:
    return i * block_size + offset


@device_function
def _value_place(i: int, offset: int, head_dim: int, block_size: int) -> Any:
    return offset * head_dim + i


@device_function
def _paired_key_place(i: int, offset: int, head_dim: int, block_size: int) -> Any:
    return (i // 2 * block_size + offset) * 2 + i % 2


@device_function
def _paired_value_place(i: int, offset: int, head_dim: int, block_size: int) -> Any:
    return (offset // 2 * head_dim + i) * 2 + offset % 2


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """One format.

    Attributes:
        name: part of the names of the compiled functions; unique to the format.
        number: the numpy type of a stored number; its bytes count.
        convert: a device function that returns the stored number for a number and a scale.
        key_place: a device function that returns the place of element `i` of the key of a block's
            token `offset` among the numbers of a head in this block.
        value_place: the same for values.
        arithmetic: arithmetic of products of float32 values and stored numbers.
        factor: what the arithmetic takes for a stored number, times this, is the number.
        largest: the largest number that the format can store; None for formats without scales.
    """

    name: str
    number: Any
    convert: Callable[..., Any]
    key_place: Callable[..., Any] = _key_place
    value_place: Callable[..., Any] = _value_place
    arithmetic: Arithmetic = Float32()
    factor: float = 1.0
    largest: float | None = None


FLOAT32 = StoredNumbers("float32", np.float32, _to_float32)
BFLOAT16 = StoredNumbers("bfloat16", np.uint16, to_bfloat16, arithmetic=BFloat16())
INT8 = StoredNumbers("int8", np.int8, _to_int8, arithmetic=Int8(), largest=127.0)
FLOAT8 = StoredNumbers(
    "float8", np.uint8, _to_float8, arithmetic=Float8(), factor=256.0, largest=448.0
)
BFLOAT16_PAIRS = StoredNumbers(
    "bfloat16_pairs", np.uint16, to_bfloat16, _paired_key_place, _paired_value_place
)
"""For AMX, which reads pairs of numbers that follow each other in the depth of a product.

They are pairs of elements of a key, and pairs of values of two tokens.
"""
