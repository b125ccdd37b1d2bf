"""The functions of `platforms.torch.layers` for float32, as numba kernels.

Each kernel loads a row from memory once.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.linear import LinearMethod
from paged_backend.platforms.cpu.math import exp2
from paged_backend.platforms.cpu.threads import ParallelKernel, claim, device_function, floats

_LOG2E = np.float32(math.log2(math.e))
_ONE = np.float32(1.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `platforms.torch.layers.rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, _bits(eps))
    return out


def add_norm(hidden: Tensor, linear: LinearMethod, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
    linear.add_to(hidden, x)
    return rms_norm(hidden, weight, eps)


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """See `platforms.torch.layers.norm_heads`; `qkv` must be contiguous."""
    _norm_heads(qkv.data_ptr(), weight.data_ptr(), *qkv.shape, *weight.shape, _bits(eps))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `platforms.torch.layers.silu_and_mul`."""
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size)
    _silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out


@cache
def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


@device_function
def _norm_scale(values: Any, eps_bits: int) -> Any:
    """Return the factor that scales `values` to a root mean square of 1."""
    total = np.float32(0.0)
    for i in range(len(values)):
        total += values[i] * values[i]
    eps = np.float32(np.int64(eps_bits).view(np.float64))
    return _ONE / np.sqrt(total / np.float32(len(values)) + eps)


def _rms_norm_rows(arguments: Any) -> None:
    _, x_address, weight_address, out_address, rows, size, eps_bits = numba.carray(arguments, 7)
    x, out = floats(x_address, (rows, size)), floats(out_address, (rows, size))
    weight = floats(weight_address, size)
    row = claim(arguments)
    while row < rows:
        scale = _norm_scale(x[row], eps_bits)
        for i in range(size):
            out[row, i] = x[row, i] * scale * weight[i]
        row = claim(arguments)


def _norm_heads_rows(arguments: Any) -> None:
    _, address, weight_address, rows, size, heads, head_dim, eps_bits = numba.carray(arguments, 8)
    qkv, weight = floats(address, (rows, size)), floats(weight_address, (heads, head_dim))
    row = claim(arguments)
    while row < rows:
        for head in range(heads):
            values = qkv[row, head * head_dim : (head + 1) * head_dim]
            scale = _norm_scale(values, eps_bits)
            for i in range(head_dim):
                values[i] *= scale * weight[head, i]
        row = claim(arguments)


def _silu_and_mul_rows(arguments: Any) -> None:
    _, address, out_address, rows, size = numba.carray(arguments, 5)
    gate_up, out = floats(address, (rows, 2, size)), floats(out_address, (rows, size))
    row = claim(arguments)
    while row < rows:
        for i in range(size):
            gate = gate_up[row, 0, i]
            power = exp2(-abs(gate) * _LOG2E)  # exp(-|gate|) never overflows
            sigmoid = (_ONE if gate >= 0 else power) / (_ONE + power)
            out[row, i] = gate * sigmoid * gate_up[row, 1, i]
        row = claim(arguments)


_rms_norm = ParallelKernel(_rms_norm_rows)
_norm_heads = ParallelKernel(_norm_heads_rows)
_silu_and_mul = ParallelKernel(_silu_and_mul_rows)
