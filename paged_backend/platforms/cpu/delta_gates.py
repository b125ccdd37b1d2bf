"""Decays and shares of the gated delta rule on the CPU; see `StateFunctions.delta_gates`."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import torch
from torch import Tensor

from paged_backend.platforms.cpu.math import sigmoid, softplus
from paged_backend.platforms.cpu.states import rows_of
from paged_backend.platforms.cpu.threads import ParallelKernel, claim_rows, exact_function, floats


def delta_gates(
    shares: Tensor, rates: Tensor, decay: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute decays and shares, see `StateFunctions.delta_gates`."""
    shares, rates = rows_of(shares), rows_of(rates)
    decay, dt_bias = decay.contiguous(), dt_bias.contiguous()
    decays, parts = torch.empty(rates.shape), torch.empty(shares.shape)
    _kernel()(
        *(tensor.data_ptr() for tensor in (shares, rates, decay, dt_bias, decays, parts)),
        *(len(rates), rates.shape[1], shares.shape[1], rates.stride(0), shares.stride(0)),
    )
    return decays, parts


@exact_function
def _compute_decays(out: int, rates: int, decay: int, dt_bias: int, size: int) -> None:
    numbers, factors, biases = floats(rates, size), floats(decay, size), floats(dt_bias, size)
    decays = floats(out, size)
    for i in range(size):
        decays[i] = factors[i] * softplus(numbers[i] + biases[i])


@exact_function
def _compute_shares(out: int, shares: int, size: int) -> None:
    numbers, parts = floats(shares, size), floats(out, size)
    for i in range(size):
        parts[i] = sigmoid(numbers[i])


# numba caches compiled functions on disk only if they are global.
def _compute_gates_of_rows(arguments: Any) -> None:
    words = numba.carray(arguments, 12)
    shares, rates, decay, dt_bias, decays, parts = words[1:7]
    num_rows, num_rates, num_shares, rate_stride, share_stride = words[7:12]
    start, end = claim_rows(arguments, num_rows)
    while start < end:
        for row in range(start, end):
            of_row = rates + row * rate_stride * 4
            _compute_decays(decays + row * num_rates * 4, of_row, decay, dt_bias, num_rates)
            of_row = shares + row * share_stride * 4
            _compute_shares(parts + row * num_shares * 4, of_row, num_shares)
        start, end = claim_rows(arguments, num_rows)


_kernel = cache(partial(ParallelKernel, _compute_gates_of_rows))
