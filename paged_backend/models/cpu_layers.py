"""The decoder's row-by-row operations on the CPU, one pass over a row each."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.cpu_math import exp2
from paged_backend.models.cpu_threads import ParallelKernel, claim, floats


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [rows, size] to a root mean square of one, then by `weight` [size]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    eps_bits = np.float64(eps).view(np.int64).item()
    _rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps_bits)
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, the two halves of each row of `gate_up` [rows, 2 * size]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    out = torch.empty(rows, width // 2)
    _silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
    return out


def _norm_rows(arguments: Any) -> None:
    _, x_address, weight_address, out_address, rows, size, eps_bits = numba.carray(arguments, 7)
    x, out = floats(x_address, (rows, size)), floats(out_address, (rows, size))
    weight = floats(weight_address, (size,))
    eps = np.float32(np.int64(eps_bits).view(np.float64))
    row = claim(arguments)
    while row < rows:
        total = np.float32(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[row, i] = x[row, i] * scale * weight[i]
        row = claim(arguments)


def _gate_rows(arguments: Any) -> None:
    _, gate_up_address, out_address, rows, size = numba.carray(arguments, 5)
    gate_up = floats(gate_up_address, (rows, 2 * size))
    out = floats(out_address, (rows, size))
    row = claim(arguments)
    while row < rows:
        for i in range(size):
            gate = gate_up[row, i]
            # The exponent is at most 0, so that the power neither overflows nor loses digits.
            power = exp2(-abs(gate) * np.float32(math.log2(math.e)))
            sigmoid = (np.float32(1.0) if gate >= 0 else power) / (np.float32(1.0) + power)
            out[row, i] = gate * sigmoid * gate_up[row, size + i]
        row = claim(arguments)


_rms_norm = ParallelKernel(_norm_rows)
_silu_and_mul = ParallelKernel(_gate_rows)
