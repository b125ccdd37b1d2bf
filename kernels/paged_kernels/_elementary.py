"""Elementary functions in float32 with small relative errors where libraries have large ones."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) in float32, with a small relative error also where it is small."""
    decay = tl.exp(-tl.abs(x))
    # log(1 + y) is 2 artanh(y / (2 + y)); here the argument is at most 1/3.
    ratio = decay / (2.0 + decay)
    square = ratio * ratio
    series = 1.0 / 15 + square * (1.0 / 17)
    series = 1.0 / 11 + square * (1.0 / 13 + square * series)
    series = 1.0 / 7 + square * (1.0 / 9 + square * series)
    series = 1.0 / 3 + square * (1.0 / 5 + square * series)
    return tl.maximum(x, 0.0) + 2.0 * ratio * (1.0 + square * series)


@triton.jit
def one_minus_exp(x):
    """Return 1 - exp(x) of negative numbers in float32, with a small relative error near 0."""
    series = 1.0 + x * (1.0 / 8) * (1.0 + x * (1.0 / 9))
    series = 1.0 + x * (1.0 / 5) * (1.0 + x * (1.0 / 6) * (1.0 + x * (1.0 / 7) * series))
    series = 1.0 + x * (1.0 / 2) * (1.0 + x * (1.0 / 3) * (1.0 + x * (1.0 / 4) * series))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))
