"""The real-gated linear recurrent unit on the CPU.

`paged_kernels.reference.rg_lru` is the reference.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.states import StateStep
from paged_backend.platforms.cpu.math import exp, sigmoid, softplus
from paged_backend.platforms.cpu.states import (
    aligned,
    check_pool,
    copy,
    fill,
    rows_of,
    sequence_at,
)
from paged_backend.platforms.cpu.threads import ParallelKernel, claim, exact_function, floats
from paged_backend.platforms.cpu.tiles import LANES

_CHANNELS, _SEQUENCES = 256, 8  # the size of a piece of work
_ONE, _SHARPNESS = np.float32(1.0), np.float32(8.0)


def rg_lru(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    recurrent_param: Tensor,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Return the states after each row.

    Args:
        x: [num_tokens, width].
        input_gate, recurrent_gate: [num_tokens, width], before the sigmoid.
        recurrent_param: [width].
        pool: [num_slots, width] float32. It is changed.
        step: the rows of each sequence. A sequence that reads slot 0 begins a text.

    Returns:
        [num_tokens, width], with the dtype of `x`.

    Raises:
        ValueError: the pool is not in float32, or not contiguous.
    """
    check_pool(pool)
    out = torch.empty(x.shape)
    rows = [rows_of(tensor.float()) for tensor in (x, input_gate, recurrent_gate)]
    shared = recurrent_param.float().contiguous(), pool, step.slots, step.query_start_loc, out
    _kernel()(
        *(tensor.data_ptr() for tensor in (*rows, *shared)),
        *(tensor.stride(0) for tensor in rows),
        *(len(step.slots), x.shape[1]),
    )
    return out.to(x.dtype)


@exact_function
def _missing_part(x: Any) -> Any:
    """Compute 1 - exp(-x) for a float32 that is at least 0, with small relative errors."""
    # Taylor's series, for which the first term left out is 3e-9 of the first one at 0.5.
    series = _ONE - x * np.float32(1 / 8)
    series = _ONE - x * np.float32(1 / 7) * series
    series = _ONE - x * np.float32(1 / 6) * series
    series = _ONE - x * np.float32(1 / 5) * series
    series = _ONE - x * np.float32(1 / 4) * series
    series = _ONE - x * np.float32(1 / 3) * series
    series = _ONE - x * np.float32(1 / 2) * series
    return x * series if x < np.float32(0.5) else _ONE - exp(-x)


@exact_function
def _store_rates(rates: int, parameters: int, size: int) -> None:
    """Store the largest rates of some channels, for their parameters; both are addresses."""
    results, numbers = floats(rates, size), floats(parameters, size)
    for i in range(size):
        results[i] = _SHARPNESS * softplus(numbers[i])


@exact_function
def _advance(
    state: int, x: int, input_gate: int, recurrent_gate: int, rates: int, size: int, is_first: bool
) -> None:
    """Change the states of some channels by a row; all are float32 at addresses."""
    states, inputs = floats(state, size), floats(x, size)
    input_gates, gates = floats(input_gate, size), floats(recurrent_gate, size)
    of_channels = floats(rates, size)
    for i in range(size):
        rate = sigmoid(gates[i]) * of_channels[i]  # the logarithm of the decay, times -1
        factor = _ONE if is_first else np.sqrt(_missing_part(rate + rate))
        added = factor * (inputs[i] * sigmoid(input_gates[i]))
        states[i] = exp(-rate) * states[i] + added


def _advance_rows(arguments: Any) -> None:
    words = numba.carray(arguments, 14)
    x, input_gate, recurrent_gate, parameters, pool, slots, starts, out = words[1:9]
    x_stride, input_stride, recurrent_stride, num_seqs, width = words[9:14]
    memory = np.zeros(2 * _CHANNELS + LANES, np.float32)
    state = aligned(memory)
    rates, blocks = state + _CHANNELS * 4, (width + _CHANNELS - 1) // _CHANNELS
    groups = (num_seqs + _SEQUENCES - 1) // _SEQUENCES
    piece = claim(arguments)
    while piece < blocks * groups:
        channel, group = piece % blocks * _CHANNELS, piece // blocks
        size = min(_CHANNELS, width - channel)
        _store_rates(rates, parameters + channel * 4, size)
        for seq in range(group * _SEQUENCES, min((group + 1) * _SEQUENCES, num_seqs)):
            first, last, source, target = sequence_at(starts, slots, seq)
            if first == last:
                continue
            is_first = source == 0
            if is_first:
                fill(state, size)
            else:
                copy(state, pool + (source * width + channel) * 4, size)
            for row in range(first, last):
                _advance(
                    *(state, x + (row * x_stride + channel) * 4),
                    input_gate + (row * input_stride + channel) * 4,
                    recurrent_gate + (row * recurrent_stride + channel) * 4,
                    *(rates, size, is_first),
                )
                is_first = False
                copy(out + (row * width + channel) * 4, state, size)
            if target != 0:
                copy(pool + (target * width + channel) * 4, state, size)
        piece = claim(arguments)
    memory[0] = 0  # numba frees an array after its last use, even if its address is in use


_kernel = cache(partial(ParallelKernel, _advance_rows))
