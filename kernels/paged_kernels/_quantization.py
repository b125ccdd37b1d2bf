"""Device functions for quantized numbers: rounding to the grid that a dtype can store."""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn
INT8_MAX = tl.constexpr(127.0)  # symmetric: -128 is never stored
# A float32 this large has no bits for a fraction, so adding it rounds a number to an integer.
_NO_FRACTION = tl.constexpr(1.5 * 2**23)


@triton.jit
def storable(x, dtype: tl.constexpr):
    """Clamp float32 numbers to what float8_e4m3fn or int8 can store, and round them for int8.

    Ties go to the even integer. The conversion to float8_e4m3fn itself rounds.
    """
    if dtype == tl.int8:
        x = tl.clamp(x, -INT8_MAX, INT8_MAX)
        x = (x + _NO_FRACTION) - _NO_FRACTION
    else:
        x = tl.clamp(x, -FP8_MAX, FP8_MAX)
    return x
