"""The gated activations of feed-forward layers and of experts.

Shazeer, "GLU Variants Improve Transformer" (2020), equations 5 and 6; the model gpt-oss adds
the limit, the factor and the offset.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu(
    gate,
    up,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr = 0.0,
):
    """Return (up + UP_OFFSET) * gate * sigmoid(ALPHA * gate + CUBIC * gate ** 3) in float32.

    If there is a limit, gate is at most this, and up is between its negative and this.
    """
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
    inner = gate * ALPHA
    if CUBIC != 0.0:
        inner = gate * (ALPHA + CUBIC * gate * gate)
    return (up + UP_OFFSET) * (gate * sigmoid(inner))


@triton.jit
def geglu(gate, up):
    """Return up * gelu(gate) in float32, with GELU approximated by a hyperbolic tangent.

    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2.
    """
    # (1 + tanh(x)) / 2 is the sigmoid of 2x; 1.5957691 is 2 * sqrt(2 / pi).
    twice = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    return up * (gate * sigmoid(twice))


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) in float32."""
    # e**-|x| is at most 1, so it cannot overflow.
    decay = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, decay) / (1.0 + decay)
