"""Elementary functions that numba's kernels inline and vectorize."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paged_backend.platforms.cpu.threads import device_function

# Taylor series of 2^x; on [-0.5, 0.5] the first term left out is 1.2e-7.
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(math.log(2) ** power / math.factorial(power)) for power in range(1, 7)
)

# Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26: an approximation of
# erf with errors up to 1.5e-7.
_P = np.float32(0.3275911)
_A1, _A2, _A3, _A4, _A5 = (
    np.float32(a) for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)
# Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2.
_GELU_SLOPE, _GELU_CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
_LOG2E = np.float32(math.log2(math.e))
_ONE, _SQRT_HALF = np.float32(1.0), np.float32(math.sqrt(0.5))


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def maximum(context: Any, a: Any, b: Any) -> Any:
    """Return the larger of two float32; unlike `max`, it leaves loops over numbers vectorized."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.f32")
        return builder.call(function, args, fastmath=("fast",))

    return types.float32(types.float32, types.float32), generate


@device_function
def exp2(x: Any) -> Any:
    """Compute 2 to the power of a float32 that is at most 0, without a call or a branch."""
    x = max(x, np.float32(-126.0))
    whole = np.floor(x + np.float32(0.5))  # math.floor gives an int64, which AVX2 has no lanes for
    f = x - whole
    fraction = f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return power + power * fraction


@device_function
def exp(x: Any) -> Any:
    """Compute e to the power of a float32 that is at most 0."""
    return exp2(x * _LOG2E)


@device_function
def sigmoid(x: Any) -> Any:
    """Compute 1 / (1 + exp(-x)) for a float32."""
    power = exp(-abs(x))  # never overflows
    return (_ONE if x >= 0 else power) / (_ONE + power)


@device_function
def silu(x: Any) -> Any:
    """Compute x * sigmoid(x) for a float32."""
    return x * sigmoid(x)


@device_function
def gelu_tanh(x: Any) -> Any:
    """Compute GELU, approximated by a hyperbolic tangent, for a float32."""
    # (1 + tanh(x)) / 2 is the sigmoid of 2x.
    return x * sigmoid(_GELU_SLOPE * x * (_ONE + _GELU_CUBE * x * x))


@device_function
def normal_cdf(x: Any) -> Any:
    """Compute (1 + erf(x / sqrt(2))) / 2 for a float32, with errors up to 1e-7."""
    distance = abs(x) * _SQRT_HALF
    t = _ONE / (_ONE + _P * distance)
    series = t * (_A1 + t * (_A2 + t * (_A3 + t * (_A4 + t * _A5))))
    tail = np.float32(0.5) * series * exp(-distance * distance)  # of the side that x is on
    return _ONE - tail if x >= 0 else tail


@device_function
def swiglu(gate: Any, up: Any, alpha: Any, limit: Any, up_offset: Any) -> Any:
    """Compute (up + up_offset) * gate * sigmoid(alpha * gate) for clamped float32.

    Gate is at most the limit, and up is between its negative and the limit.
    """
    gate = min(gate, limit)
    up = max(min(up, limit), -limit)
    return (up + up_offset) * (gate * sigmoid(alpha * gate))
