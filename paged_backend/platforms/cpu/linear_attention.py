"""Linear attention with a fixed decay for each head on the CPU.

`paged_kernels.reference.linear_attention` is the reference.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from paged_backend.models.states import StateStep
from paged_backend.platforms.cpu.math import exp
from paged_backend.platforms.cpu.state_heads import Heads, make_attend, run
from paged_backend.platforms.cpu.state_panels import make_step
from paged_backend.platforms.cpu.states import copy, rows_of
from paged_backend.platforms.cpu.threads import ParallelKernel, exact_function, floats


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Return the attention of each row to the sum of earlier keys and values, without a scale.

    Args:
        q, k: [num_tokens, heads, key_dim].
        v: [num_tokens, heads, value_dim].
        slopes: [heads] float32, positive; a head decays by exp(-slope) at each row.
        pool: [num_slots, heads, key_dim, value_dim] float32. It is changed.
        step: the rows of each sequence.

    Returns:
        [num_tokens, heads, value_dim], with the dtype of `v`.

    Raises:
        ValueError: the pool is not in float32, or not contiguous.
    """
    out = torch.empty(v.shape)
    inputs = [rows_of(tensor.float()) for tensor in (q, k, v)]
    slopes = slopes.float().contiguous()
    # There is no beta, and so no place of one that is read.
    run(_kernel(), (*inputs, slopes, slopes), (pool, step.slots, step.query_start_loc), out)
    return out.to(v.dtype)


@exact_function
def _prepare(heads: Heads, row: int, head: int, prepared: int) -> None:
    """See `state_heads.make_attend`; nothing is recalled."""
    size = heads.key_dim
    decay = exp(-floats(heads.decays, heads.heads)[head])
    decays = floats(prepared, size)
    for i in range(size):
        decays[i] = decay
    copy(prepared + size * 4, heads.k + (row * heads.k_stride + head * size) * 4, size)
    copy(prepared + size * 8, heads.q + (row * heads.q_stride + head * size) * 4, size)


_attend = make_attend("linear_attention", _prepare, make_step(corrects=False))


# numba caches compiled functions on disk only if they are global.
def _attend_rows(arguments: Any) -> None:
    _attend(arguments)


_kernel = cache(partial(ParallelKernel, _attend_rows))
