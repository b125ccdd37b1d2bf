"""Elementary functions that numba's kernels inline and vectorize."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paged_backend.platforms.cpu.threads import device_function, exact_function

_FAST = ("fast",)
# Taylor series of 2^x; on [-0.5, 0.5] the first term left out is 1.2e-7.
_COEFFICIENTS = [math.log(2) ** power / math.factorial(power) for power in range(1, 7)]

# Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26: an approximation of
# erf with errors up to 1.5e-7.
_P = np.float32(0.3275911)
_A1, _A2, _A3, _A4, _A5 = (
    np.float32(a) for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)
# Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2.
_GELU_SLOPE, _GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
_LOG2E = math.log2(math.e)
_ONE, _SQRT_HALF = np.float32(1.0), np.float32(math.sqrt(0.5))


def emit_maximum(builder: Any, a: Any, b: Any) -> Any:
    """Emit the larger of two float32, or of each pair of two vectors of them."""
    return _call(builder, "maxnum", a, b)


def emit_exp2(builder: Any, x: Any) -> Any:
    """Emit 2 to the power of a float32 that is at most 0, or of a vector of them.

    The result is 0 where it would be less than the smallest normal number.
    """
    number = partial(_constant, x.type)
    x = emit_maximum(builder, x, number(-127))
    whole = _call(builder, "floor", builder.fadd(x, number(0.5), flags=_FAST))
    f = builder.fsub(x, whole, flags=_FAST)
    fraction = number(_COEFFICIENTS[-1])
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        product = builder.fmul(fraction, f, flags=_FAST)
        fraction = builder.fadd(product, number(coefficient), flags=_FAST)
    fraction = builder.fmul(fraction, f, flags=_FAST)
    integer = _like(x.type, ir.IntType(32))
    exponent = builder.add(builder.fptosi(whole, integer), _constant(integer, 127))
    power = builder.bitcast(builder.shl(exponent, _constant(integer, 23)), x.type)
    return builder.fadd(power, builder.fmul(power, fraction, flags=_FAST), flags=_FAST)


def emit_sigmoid(builder: Any, x: Any) -> Any:
    """Emit 1 / (1 + exp(-x)) of a float32, or of a vector of them."""
    one = _constant(x.type, 1.0)
    distance = builder.fmul(_call(builder, "fabs", x), _constant(x.type, -_LOG2E), flags=_FAST)
    power = emit_exp2(builder, distance)  # never overflows
    is_positive = builder.fcmp_ordered(">=", x, _constant(x.type, 0.0))
    total = builder.fadd(one, power, flags=_FAST)
    return builder.fdiv(builder.select(is_positive, one, power), total, flags=_FAST)


def emit_silu(builder: Any, x: Any) -> Any:
    """Emit x * sigmoid(x) of a float32, or of a vector of them."""
    return builder.fmul(x, emit_sigmoid(builder, x), flags=_FAST)


def emit_swiglu(
    builder: Any, gate: Any, up: Any, alpha: Any, limit: Any, up_offset: Any, cubic: Any
) -> Any:
    """Emit `swiglu` of float32, or of vectors of them."""
    gate = _call(builder, "minnum", gate, limit)
    lowest = builder.fsub(_constant(up.type, 0.0), limit, flags=_FAST)
    up = emit_maximum(builder, _call(builder, "minnum", up, limit), lowest)
    square = builder.fmul(builder.fmul(cubic, gate, flags=_FAST), gate, flags=_FAST)
    factor = builder.fadd(alpha, square, flags=_FAST)
    sigmoid = emit_sigmoid(builder, builder.fmul(factor, gate, flags=_FAST))
    gated = builder.fmul(gate, sigmoid, flags=_FAST)
    return builder.fmul(builder.fadd(up, up_offset, flags=_FAST), gated, flags=_FAST)


def emit_gelu_tanh(builder: Any, x: Any) -> Any:
    """Emit GELU, approximated by a hyperbolic tangent, of a float32, or of a vector of them."""
    # (1 + tanh(x)) / 2 is the sigmoid of 2x.
    one, slope, cube = (_constant(x.type, number) for number in (1.0, _GELU_SLOPE, _GELU_CUBE))
    square = builder.fmul(builder.fmul(cube, x, flags=_FAST), x, flags=_FAST)
    factor = builder.fmul(slope, builder.fadd(one, square, flags=_FAST), flags=_FAST)
    argument = builder.fmul(x, factor, flags=_FAST)
    return builder.fmul(x, emit_sigmoid(builder, argument), flags=_FAST)


def _of_numbers(emit: Callable[..., Any]) -> Any:
    """Return the function of float32 that is emitted, without a call or a branch."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def function(context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *args)

        return types.float32(types.float32), generate

    return function


def _like(kind: Any, element: Any) -> Any:
    """Return the type of an element, or of as many as a vector type has."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _constant(kind: Any, value: Any) -> Any:
    value = float(np.float32(value)) if isinstance(value, float) else value
    is_vector = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [value] * kind.count if is_vector else value)


def _call(builder: Any, name: str, *args: Any) -> Any:
    """Emit a call of LLVM's function on numbers, or on vectors of numbers."""
    kind = args[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(args)), f"llvm.{name}.{suffix}"
    )
    return builder.call(function, args, fastmath=_FAST)


exp2 = _of_numbers(emit_exp2)
"""Compute 2 to the power of a float32 that is at most 0."""

sigmoid = _of_numbers(emit_sigmoid)
"""Compute 1 / (1 + exp(-x)) for a float32."""

gelu_tanh = _of_numbers(emit_gelu_tanh)
"""Compute GELU, approximated by a hyperbolic tangent, for a float32."""


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def maximum(context: Any, a: Any, b: Any) -> Any:
    """Return the larger of two float32; unlike `max`, it leaves loops over numbers vectorized."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_maximum(builder, *args)

    return types.float32(types.float32, types.float32), generate


@device_function
def exp(x: Any) -> Any:
    """Compute e to the power of a float32 that is at most 0."""
    return exp2(x * np.float32(_LOG2E))


@exact_function
def softplus(x: Any) -> Any:
    """Compute log(1 + exp(x)) for a float32.

    Relative errors are up to 5e-7, and up to 4e-6 below -5. Below -87 the result is 0.
    """
    # log(1 + y) = 2 artanh(y / (2 + y)), as a series; for y up to 1 the first term left out is
    # 1.4e-9 of the first one.
    y = exp(-abs(x))
    z = y / (np.float32(2.0) + y)
    square = z * z
    series = np.float32(1 / 15)
    series = series * square + np.float32(1 / 13)
    series = series * square + np.float32(1 / 11)
    series = series * square + np.float32(1 / 9)
    series = series * square + np.float32(1 / 7)
    series = series * square + np.float32(1 / 5)
    series = series * square + np.float32(1 / 3)
    series = series * square + _ONE
    return maximum(x, np.float32(0.0)) + np.float32(2.0) * z * series


@device_function
def normal_cdf(x: Any) -> Any:
    """Compute (1 + erf(x / sqrt(2))) / 2 for a float32, with errors up to 1e-7."""
    distance = abs(x) * _SQRT_HALF
    t = _ONE / (_ONE + _P * distance)
    series = t * (_A1 + t * (_A2 + t * (_A3 + t * (_A4 + t * _A5))))
    tail = np.float32(0.5) * series * exp(-distance * distance)  # area beyond x, on its side of 0
    return _ONE - tail if x >= 0 else tail


@device_function
def swiglu(gate: Any, up: Any, alpha: Any, limit: Any, up_offset: Any, cubic: Any) -> Any:
    """Compute (up + up_offset) * gate * sigmoid(alpha * gate + cubic * gate ** 3) in float32.

    Gate is at most the limit, and up is between its negative and the limit.
    """
    gate = min(gate, limit)
    up = max(min(up, limit), -limit)
    factor = alpha + cubic * gate * gate
    return (up + up_offset) * (gate * sigmoid(factor * gate))


@device_function
def swiglu_row(gate_up: Any, out: Any, alpha: Any, limit: Any, up_offset: Any, cubic: Any) -> None:
    """Store `swiglu` of gate and up [2, size] in `out` [size]."""
    for i in range(len(out)):
        out[i] = swiglu(gate_up[0, i], gate_up[1, i], alpha, limit, up_offset, cubic)
