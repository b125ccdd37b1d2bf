"""The selective scan of Mamba on the CPU.

`paged_kernels.reference.mamba1_scan` is the reference.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.states import StateStep
from paged_backend.platforms.cpu.math import softplus
from paged_backend.platforms.cpu.state_scan import LOG2E, make_scan
from paged_backend.platforms.cpu.states import (
    aligned,
    begin,
    check_pool,
    copy,
    fill,
    part_of,
    rows_of,
    sequence_at,
)
from paged_backend.platforms.cpu.threads import ParallelKernel, claim, exact_function, floats
from paged_backend.platforms.cpu.tiles import LANES

_CHANNELS = 256  # channels of a piece of work


def mamba1_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Return the outputs of a state space with decays for each number of a state.

    Args:
        x: [num_tokens, inner].
        dt: [num_tokens, inner], the time steps before their bias and softplus.
        a: [inner, state_dim] float32, negative.
        b, c: [num_tokens, state_dim].
        d: [inner], or None for no such term.
        dt_bias: [inner], or None.
        pool: [num_slots, inner, state_dim] float32. It is changed.
        step: the rows of each sequence.

    Returns:
        [num_tokens, inner], with the dtype of `x`.

    Raises:
        ValueError: the pool is not in float32, or not contiguous.
    """
    check_pool(pool)
    out = torch.empty(x.shape)
    rows = [rows_of(tensor.float()) for tensor in (x, dt, b, c)]
    inner = [None if tensor is None else tensor.float().contiguous() for tensor in (a, d, dt_bias)]
    _kernel()(
        *(tensor.data_ptr() for tensor in rows),
        *(0 if tensor is None else tensor.data_ptr() for tensor in inner),
        *(tensor.data_ptr() for tensor in (pool, step.slots, step.query_start_loc, out)),
        *(tensor.stride(0) for tensor in rows),
        *(len(step.slots), *pool.shape[1:]),
    )
    return out.to(x.dtype)


_scan = make_scan("mamba1", one_decay=False)


@exact_function
def _prepare(times: int, inputs: int, dt: int, dt_bias: int, x: int, size: int) -> None:
    """Store the time steps of some channels, as powers of 2, and their inputs at addresses."""
    steps, biases, numbers = floats(dt, size), floats(dt_bias, size), floats(x, size)
    powers, added = floats(times, size), floats(inputs, size)
    for i in range(size):
        step = softplus(steps[i] + biases[i])
        powers[i] = step * LOG2E
        added[i] = step * numbers[i]


@exact_function
def _add_products(out: int, x: int, factors: int, size: int) -> None:
    """Add the products of two vectors to a third one; all are at addresses."""
    results, numbers, weights = floats(out, size), floats(x, size), floats(factors, size)
    for i in range(size):
        results[i] += numbers[i] * weights[i]


def _scan_rows(arguments: Any) -> None:
    words = numba.carray(arguments, 19)
    x, dt, b, c, a, d, dt_bias, pool, slots, starts, out = words[1:12]
    x_stride, dt_stride, b_stride, c_stride, num_seqs, inner, state_dim = words[12:19]
    line = _CHANNELS * 4
    # The part of a state that takes the place of slot 0, then the inputs of a row, and its times.
    memory = np.zeros(_CHANNELS * (state_dim + 3) + LANES, np.float32)
    spare = aligned(memory)
    inputs = spare + line * state_dim
    times, biases, blocks = inputs + line, inputs + 2 * line, (inner + _CHANNELS - 1) // _CHANNELS
    piece = claim(arguments)
    while piece < blocks * num_seqs:
        seq, channel = piece // blocks, piece % blocks * _CHANNELS
        count = min(_CHANNELS, inner - channel)
        first, last, source, target = sequence_at(starts, slots, seq)
        here = channel * state_dim * 4
        place = part_of(pool, source, inner, 0, state_dim) + here
        after = spare if target == 0 else part_of(pool, target, inner, 0, state_dim) + here
        if first < last:
            place = begin(place, after, count * state_dim, source)
            if dt_bias != 0:
                copy(biases, dt_bias + channel * 4, count)
            else:
                fill(biases, count)
        for row in range(first, last):
            numbers = x + (row * x_stride + channel) * 4
            results = out + (row * inner + channel) * 4
            _prepare(*(times, inputs, dt + (row * dt_stride + channel) * 4, biases, numbers, count))
            _scan(
                *(count, state_dim, place, after, times, a + here, inputs),
                *(b + row * b_stride * 4, c + row * c_stride * 4, results),
            )
            if d != 0:
                _add_products(results, numbers, d + channel * 4, count)
            place = after
        piece = claim(arguments)
    memory[0] = 0  # numba frees an array after its last use, even if its address is in use


_kernel = cache(partial(ParallelKernel, _scan_rows))
