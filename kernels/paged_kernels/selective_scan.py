"""The selective scan of Mamba-2: a state space with one decay for each head.

Dao and Gu, "Transformers are SSMs" (2024), sections 5 and 6. `_states.py` and `_chunks.py` say what
is promised about the bits of results.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paged_kernels._chunks import check_lengths
from paged_kernels._decayed_scan import decayed_scan
from paged_kernels._rates import Rates
from paged_kernels._states import check_heads, check_pool, check_rows, check_step
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor | None = None,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
    num_decodes: int = 0,
) -> Tensor:
    """Let each row turn the states of its sequence, and read them, in float32, rounded once.

    With t = softplus(dt + dt_bias) within its limits, a row turns the state S of a head into
    exp(t a) S + (t x) b^T, and its result is S c + d x.

    Args:
        x: [num_tokens, heads, head_dim] bfloat16, float16 or float32. Its rows, and those of `dt`,
            `b` and `c`, may be strided by multiples of 16 bytes.
        dt: [num_tokens, heads], dtype of `x` or float32.
        a: [heads] float32, negative.
        b: [num_tokens, groups, state_dim], dtype of `x`. A group serves neighboring heads.
        c: like `b`.
        d: [heads], dtype of `x` or float32, or None for no such term.
        dt_bias: [heads], dtype of `x` or float32, or None.
        pool: [num_slots, heads, head_dim, state_dim] bfloat16, float16 or float32; updated.
        slots: [num_seqs, 2] int32, the slot that a state is read from and the one that it is
            written to, which may be equal. Slot 0 is read as zeros.
        query_start_loc: [num_seqs + 1] int32; a sequence may have no rows, and then no state is
            written.
        seq_lens: [num_seqs] int32, the rows of each sequence in this and all earlier steps, for
            computing prompts in chunks; only read for sequences with several rows. With None, all
            rows are computed one by one: no bit depends on steps, and prompts take much longer.
        dt_limits: the smallest and the largest time step.
        num_decodes: number of leading sequences with at most `FEW_ROWS` rows, which need no chunks;
            no length is read on the host.

    Returns:
        [num_tokens, heads, head_dim], dtype of `x`; zeros in rows of no sequence.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_rows("x", x, x, None, None, None, dtypes=MODEL_DTYPES)
    device = device_of("x", x)
    num_tokens, heads, head_dim = x.shape
    check_heads("x", x, x, num_tokens, heads, head_dim)
    dtypes = (x.dtype, torch.float32)
    check_rows("dt", dt, x, num_tokens, heads, dtypes=dtypes)
    check_tensor("a", a, (heads,), torch.float32, like=x)
    check_heads("b", b, x, num_tokens, None, None)
    _, groups, state_dim = b.shape
    divides = groups > 0 and heads % groups == 0
    check(divides, "b", f"must have groups that divide {heads} heads, got {groups}")
    check_heads("c", c, x, num_tokens, groups, state_dim)
    for name, parameter in (("d", d), ("dt_bias", dt_bias)):
        if parameter is not None:
            check_tensor(name, parameter, (heads,), dtypes, like=x)
    check_pool(pool, x, heads, head_dim, state_dim)
    check(dt_limits[0] <= dt_limits[1], "dt_limits", f"must be in order, got {dt_limits}")
    check_lengths(x, seq_lens, check_step(x, slots, query_start_loc), num_decodes)
    return decayed_scan(
        c, b, x, Rates(a, dt, dt_bias, dt_limits), d, pool, slots, query_start_loc, seq_lens,
        keys_last=True, num_decodes=num_decodes, device=device,
    )  # fmt: skip
