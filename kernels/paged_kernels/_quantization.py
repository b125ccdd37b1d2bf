"""Device functions for quantized numbers: rounding to the grid that a dtype can store."""

from __future__ import annotations

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn
INT8_MAX = tl.constexpr(127.0)  # symmetric: -128 is never stored
# A float32 this large has no bits for a fraction, so adding it rounds a number to an integer.
_NO_FRACTION = tl.constexpr(1.5 * 2**23)


@triton.jit
def scales_of(largest, dtype: tl.constexpr):
    """Return the scales of numbers by their largest absolute values; 1 where it would be 0."""
    scales = tl.div_rn(largest, INT8_MAX if dtype == tl.int8 else FP8_MAX)
    return tl.where(scales == 0.0, 1.0, scales)


@triton.jit
def divided(x, scales):
    """Return the quotients, exactly rounded, so that they are the same on every device."""
    return tl.div_rn(x, tl.broadcast_to(scales, x.shape))


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
