"""The functions of `layers` for float32 on the CPU: one pass over memory, one call each."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.models.cpu_math import exp2
from paged_backend.models.cpu_tiles import device_function, kernel, use_torch_threads

Floats = NDArray[np.float32]

_LOG2E = np.float32(math.log2(math.e))
_ONE = np.float32(1.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers.rms_norm`."""
    use_torch_threads()
    out = torch.empty_like(x)
    _rms_norm(x.numpy(), weight.numpy(), eps, out.numpy())
    return out


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """As `layers.norm_heads`."""
    use_torch_threads()
    _norm_heads(qkv.numpy(), weight.numpy(), eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `layers.silu_and_mul`."""
    use_torch_threads()
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    _silu_and_mul(gate_up.numpy(), out.numpy())
    return out


@kernel
def _rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    for row in numba.prange(len(x)):
        scale = _norm_scale(x[row], eps)
        for i in range(len(weight)):
            out[row, i] = x[row, i] * scale * weight[i]


@kernel
def _norm_heads(qkv: Floats, weight: Floats, eps: float) -> None:
    num_heads, head_dim = weight.shape
    for row in numba.prange(len(qkv)):
        for head in range(num_heads):
            values = qkv[row, head * head_dim : (head + 1) * head_dim]
            scale = _norm_scale(values, eps)
            for i in range(head_dim):
                values[i] *= scale * weight[head, i]


@kernel
def _silu_and_mul(gate_up: Floats, out: Floats) -> None:
    size = out.shape[1]
    for row in numba.prange(len(out)):
        _silu_and_mul_into(out[row], gate_up[row, :size], gate_up[row, size:])


@device_function
def _norm_scale(values: Floats, eps: float) -> Any:
    """The factor that gives `values` a root mean square of one."""
    total = np.float32(0.0)
    for i in range(len(values)):
        total += values[i] * values[i]
    return _ONE / np.sqrt(total / np.float32(len(values)) + np.float32(eps))


@device_function
def _silu_and_mul_into(out: Floats, gate: Floats, up: Floats) -> None:
    for i in range(len(out)):
        power = exp2(-abs(gate[i]) * _LOG2E)  # exp(-|gate|) never overflows
        out[i] = gate[i] * (_ONE if gate[i] >= 0 else power) / (_ONE + power) * up[i]
