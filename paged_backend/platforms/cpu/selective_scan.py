"""The selective scan of Mamba-2 on the CPU.

`paged_kernels.reference.selective_scan` is the reference.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.states import StateStep
from paged_backend.platforms.cpu.math import maximum, softplus
from paged_backend.platforms.cpu.state_scan import LOG2E, make_scan
from paged_backend.platforms.cpu.states import (
    aligned,
    begin,
    check_pool,
    fill,
    part_of,
    prefetch,
    rows_of,
    sequence_at,
)
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    exact_function,
    float_bits,
    float_of,
    floats,
)
from paged_backend.platforms.cpu.tiles import LANES

_NO_LIMIT = float(np.finfo(np.float32).max)  # compiled code may assume that no number is infinite
_BLOCK = 8192  # numbers of a state that all rows of a piece change, before the next ones


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    step: StateStep,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Return the outputs of a state space with one decay for each head.

    Args:
        x: [num_tokens, heads, head_dim].
        dt: [num_tokens, heads], the time steps before their bias and softplus.
        a: [heads] float32, negative.
        b, c: [num_tokens, groups, state_dim]; a group serves neighboring heads.
        d: [heads], or None for no such term.
        dt_bias: [heads], or None.
        pool: [num_slots, heads, head_dim, state_dim] float32. It is changed.
        step: the rows of each sequence.
        dt_limits: the smallest and the largest time step, at least 0.

    Returns:
        [num_tokens, heads, head_dim], with the dtype of `x`.

    Raises:
        ValueError: the pool is not in float32, or not contiguous.
    """
    check_pool(pool)
    out = torch.empty(x.shape)
    rows = [rows_of(tensor.float()) for tensor in (x, dt, b, c)]
    heads = [None if tensor is None else tensor.float().contiguous() for tensor in (a, d, dt_bias)]
    low, high = (float_bits(min(limit, _NO_LIMIT)) for limit in dt_limits)
    _kernel()(
        *(tensor.data_ptr() for tensor in rows),
        *(0 if tensor is None else tensor.data_ptr() for tensor in heads),
        *(tensor.data_ptr() for tensor in (pool, step.slots, step.query_start_loc, out)),
        *(tensor.stride(0) for tensor in rows),
        *(len(step.slots), b.shape[1], *pool.shape[1:], low, high),
    )
    return out.to(x.dtype)


_scan = make_scan("mamba2", one_decay=True)


@exact_function
def _add_times(out: int, x: int, factor: Any, size: int) -> None:
    """Add a vector, times a factor, to the one at an address."""
    numbers, results = floats(x, size), floats(out, size)
    for i in range(size):
        results[i] += numbers[i] * factor


@exact_function
def _step_of(dt: Any, offset: Any, low: Any, high: Any) -> Any:
    """Return the time step of a row."""
    return min(maximum(softplus(dt + offset), low), high)


@exact_function
def _power_of(step: Any, rate: Any) -> Any:
    """Return the power of 2 by which a state decays in a time step."""
    return step * rate * LOG2E


def _scan_rows(arguments: Any) -> None:
    words = numba.carray(arguments, 23)
    x, dt, b, c, a, d, dt_bias, pool, slots, starts, out = words[1:12]
    x_stride, dt_stride, b_stride, c_stride = words[12:16]
    num_seqs, groups, heads, head_dim, state_dim, low, high = words[16:23]
    size, lines = head_dim * state_dim, max(_BLOCK // state_dim, 1)
    # A state that takes the place of slot 0, then the inputs of a row, and its time.
    memory = np.zeros(size + head_dim + 1 + LANES, np.float32)
    spare = aligned(memory)
    inputs, time = spare + size * 4, spare + (size + head_dim) * 4
    piece = claim(arguments)
    while piece < num_seqs * heads:
        seq, head = piece // heads, piece % heads
        first, last, source, target = sequence_at(starts, slots, seq)
        after = spare if target == 0 else part_of(pool, target, heads, head, size)
        before = part_of(pool, source, heads, head, size)
        if first < last:
            before = begin(before, after, size, source)
        rate, group = floats(a, heads)[head], head // (heads // groups)
        offset = floats(dt_bias, heads)[head] if dt_bias != 0 else np.float32(0.0)
        for line in range(0, head_dim, lines):
            count = min(lines, head_dim - line)
            here = line * state_dim * 4
            place = before + here
            for row in range(first, last):
                raw = floats(dt + (row * dt_stride + head) * 4, 1)[0]
                step = _step_of(raw, offset, float_of(low), float_of(high))
                floats(time, 1)[0] = _power_of(step, rate)
                numbers = x + (row * x_stride + head * head_dim + line) * 4
                results = out + ((row * heads + head) * head_dim + line) * 4
                of_b = b + (row * b_stride + group * state_dim) * 4
                of_c = c + (row * c_stride + group * state_dim) * 4
                prefetch(numbers + x_stride * 4, count)
                prefetch(results + heads * head_dim * 4, count)
                prefetch(of_b + b_stride * 4, state_dim)
                prefetch(of_c + c_stride * 4, state_dim)
                fill(inputs, count)
                _add_times(inputs, numbers, step, count)
                _scan(
                    *(count, state_dim, place, after + here, time, np.int64(0), inputs),
                    *(of_b, of_c, results),
                )
                if d != 0:
                    _add_times(results, numbers, floats(d, heads)[head], count)
                place = after + here
        piece = claim(arguments)
    memory[0] = 0  # numba frees an array after its last use, even if its address is in use


_kernel = cache(partial(ParallelKernel, _scan_rows))
