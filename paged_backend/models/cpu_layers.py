"""The functions of `layers` for float32 on the CPU: one pass over memory, one call each."""

from __future__ import annotations

import math

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


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `layers.add_rms_norm`."""
    workers = use_torch_threads()
    out = torch.empty_like(hidden)
    _add_rms_norm(
        hidden.numpy(), delta.numpy(), weight.numpy(), np.float32(eps), out.numpy(), workers
    )
    return out


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """As `layers.norm_heads`."""
    _norm_heads(qkv.numpy(), weight.numpy(), np.float32(eps), use_torch_threads())


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `layers.silu_and_mul`."""
    workers = use_torch_threads()
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    _silu_and_mul(gate_up.numpy(), out.numpy(), workers)
    return out


@kernel
def _add_rms_norm(
    hidden: Floats, delta: Floats, weight: Floats, eps: float, out: Floats, workers: int
) -> None:
    for worker in numba.prange(workers):
        for row in range(worker * len(hidden) // workers, (worker + 1) * len(hidden) // workers):
            for i in range(hidden.shape[1]):
                hidden[row, i] += delta[row, i]
            _norm_into(out[row], hidden[row], weight, eps)


@kernel
def _norm_heads(qkv: Floats, weight: Floats, eps: float, workers: int) -> None:
    num_heads, head_dim = weight.shape
    for worker in numba.prange(workers):
        for row in range(worker * len(qkv) // workers, (worker + 1) * len(qkv) // workers):
            for head in range(num_heads):
                values = qkv[row, head * head_dim : (head + 1) * head_dim]
                _norm_into(values, values, weight[head], eps)


@kernel
def _silu_and_mul(gate_up: Floats, out: Floats, workers: int) -> None:
    for worker in numba.prange(workers):
        for row in range(worker * len(out) // workers, (worker + 1) * len(out) // workers):
            size = out.shape[1]
            _silu_and_mul_into(out[row], gate_up[row, :size], gate_up[row, size:])


@device_function
def _norm_into(out: Floats, values: Floats, weight: Floats, eps: float) -> None:
    total = np.float32(0.0)
    for i in range(len(values)):
        total += values[i] * values[i]
    scale = _ONE / np.sqrt(total / np.float32(len(values)) + eps)
    for i in range(len(values)):
        out[i] = values[i] * scale * weight[i]


@device_function
def _silu_and_mul_into(out: Floats, gate: Floats, up: Floats) -> None:
    for i in range(len(out)):
        power = exp2(-abs(gate[i]) * _LOG2E)  # exp(-|gate|) never overflows
        out[i] = gate[i] * (_ONE if gate[i] >= 0 else power) / (_ONE + power) * up[i]
