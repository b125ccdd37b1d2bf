"""Linear attention by the gated delta rule on the CPU.

`paged_kernels.reference.gated_delta` is the reference.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_backend.models.states import StateStep
from paged_backend.platforms.cpu.math import exp
from paged_backend.platforms.cpu.state_heads import Heads, make_attend, run
from paged_backend.platforms.cpu.state_panels import make_step, sum_of_squares
from paged_backend.platforms.cpu.states import rows_of
from paged_backend.platforms.cpu.threads import ParallelKernel, exact_function, floats

_ONE, _EPS = np.float32(1.0), np.float32(1e-6)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Return the attention of each row to a state that it has corrected.

    Args:
        q, k: [num_tokens, num_key_heads, key_dim], of any length; they are divided by it, and
            queries by the root of key_dim. A key head serves neighboring value heads.
        v: [num_tokens, num_value_heads, value_dim].
        g: the logarithm of the decay, [num_tokens, num_value_heads], or for each key channel
            [num_tokens, num_value_heads, key_dim].
        beta: [num_tokens, num_value_heads].
        pool: [num_slots, num_value_heads, key_dim, value_dim] float32. It is changed.
        step: the rows of each sequence.

    Returns:
        [num_tokens, num_value_heads, value_dim], with the dtype of `v`.

    Raises:
        ValueError: the pool is not in float32, or not contiguous.
    """
    out = torch.empty(v.shape)
    inputs = tuple(rows_of(tensor.float()) for tensor in (q, k, v, g, beta))
    run(_kernel(), inputs, (pool, step.slots, step.query_start_loc), out)
    return out.to(v.dtype)


@exact_function
def _factor(address: int, size: int) -> Any:
    """Return the factor that makes the length of a vector 1."""
    return _ONE / np.sqrt(sum_of_squares(address, size) + _EPS)


@exact_function
def _prepare(heads: Heads, row: int, head: int, prepared: int) -> None:
    """See `state_heads.make_attend`."""
    size, each = heads.key_dim, heads.decays_of_head
    key_head = head // (heads.heads // heads.key_heads)
    query = heads.q + (row * heads.q_stride + key_head * size) * 4
    of_key = heads.k + (row * heads.k_stride + key_head * size) * 4
    q, k = floats(query, size), floats(of_key, size)
    logarithms = floats(heads.decays + (row * heads.decay_stride + head * each) * 4, each)
    numbers = floats(prepared, (4, size))
    if each == 1:
        numbers[0, :] = exp(logarithms[0])
    else:
        for i in range(size):
            numbers[0, i] = exp(logarithms[i])
    of_queries = _factor(query, size) / np.sqrt(np.float32(size))
    of_keys = _factor(of_key, size)
    for i in range(size):
        key = k[i] * of_keys
        numbers[1, i] = key
        numbers[2, i] = q[i] * of_queries
        numbers[3, i] = key * numbers[0, i]


_attend = make_attend("gated_delta", _prepare, make_step(corrects=True))


# numba caches compiled functions on disk only if they are global.
def _attend_rows(arguments: Any) -> None:
    _attend(arguments)


_kernel = cache(partial(ParallelKernel, _attend_rows))
