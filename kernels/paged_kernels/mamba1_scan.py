"""The selective scan of Mamba: a state space with decays for each number of a channel's state.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), sections 2
and 3. `_states.py` says what is promised about the bits of results.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._rates import time_steps
from paged_kernels._states import (
    check_pool,
    check_rows,
    check_step,
    load_state,
    store_state,
    zero_rows_of_no_sequence,
)
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check_tensor
from paged_kernels.tuning.states import channel_scan_config


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _mamba1_scan_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    bias_ptr,
    pool_ptr,
    slots_ptr,
    starts_ptr,
    out_ptr,
    longest,
    num_seqs,
    num_tokens,
    INNER: tl.constexpr,
    STATE_DIM: tl.constexpr,
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: a sequence and a tile of its channels, row by row."""
    wait_for_launch_before(DEPENDENT)
    seq = tl.program_id(1)
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, NUMBERS)
    real, real_number = channel < INNER, number < STATE_DIM
    zero_rows_of_no_sequence(out_ptr, channel, seq, num_seqs, num_tokens, starts_ptr, INNER, real)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if start == end:
        return
    source, target = tl.load(slots_ptr + 2 * seq), tl.load(slots_ptr + 2 * seq + 1)
    at = channel[:, None] * STATE_DIM + number[None, :]
    mask = real[:, None] & real_number[None, :]
    state = load_state(pool_ptr, at, source, INNER * STATE_DIM, mask)
    rates = tl.load(a_ptr + at, mask=mask, other=0.0)
    for index in tl.range(start, end, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        x = tl.load(x_ptr + row * X_STRIDE + channel, mask=real, other=0.0).to(tl.float32)
        steps = tl.load(dt_ptr + row * DT_STRIDE + channel, mask=real, other=0.0)
        b = tl.load(b_ptr + row * B_STRIDE + number, mask=real_number, other=0.0)
        c = tl.load(c_ptr + row * C_STRIDE + number, mask=real_number, other=0.0)
        step = time_steps(steps, bias_ptr, channel, real, 0.0, longest)
        update = (step * x)[:, None] * b.to(tl.float32)[None, :]
        state = state * tl.exp(step[:, None] * rates) + update
        result = tl.sum(state * c.to(tl.float32)[None, :], 1)
        if d_ptr is not None:
            result += tl.load(d_ptr + channel, mask=real, other=0.0).to(tl.float32) * x
        out_ptrs = out_ptr + row * INNER + channel
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=real)
    store_state(pool_ptr, at, target, INNER * STATE_DIM, state, mask)


def mamba1_scan(
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
) -> Tensor:
    """Let each row turn the states of its sequence, and read them, in float32, rounded once.

    With t = softplus(dt + dt_bias), a row turns the state s of a channel into exp(t a) s + t x b,
    and its result is the product of s and c, plus d x.

    Args:
        x: [num_tokens, inner] bfloat16, float16 or float32. Its rows, and those of `dt`, `b` and
            `c`, may be strided by multiples of 16 bytes.
        dt: [num_tokens, inner], dtype of `x` or float32.
        a: [inner, state_dim] float32, negative.
        b: [num_tokens, state_dim], dtype of `x`.
        c: like `b`.
        d: [inner], dtype of `x` or float32, or None for no such term.
        dt_bias: [inner], dtype of `x` or float32, or None.
        pool: [num_slots, inner, state_dim] bfloat16, float16 or float32; updated.
        slots: [num_seqs, 2] int32, the slot that a state is read from and the one that it is
            written to, which may be equal. Slot 0 is read as zeros.
        query_start_loc: [num_seqs + 1] int32; a sequence may have no rows, and then no state is
            written.

    Returns:
        [num_tokens, inner], dtype of `x`; zeros in rows of no sequence.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_rows("x", x, x, None, None, dtypes=MODEL_DTYPES)
    device = device_of("x", x)
    num_tokens, inner = x.shape
    dtypes = (x.dtype, torch.float32)
    check_rows("dt", dt, x, num_tokens, inner, dtypes=dtypes)
    check_tensor("a", a, (inner, None), torch.float32, like=x)
    state_dim = a.shape[1]
    check_rows("b", b, x, num_tokens, state_dim)
    check_rows("c", c, x, num_tokens, state_dim)
    for name, parameter in (("d", d), ("dt_bias", dt_bias)):
        if parameter is not None:
            check_tensor(name, parameter, (inner,), dtypes, like=x)
    check_pool(pool, x, inner, state_dim)
    num_seqs = check_step(x, slots, query_start_loc)
    out = torch.empty((num_tokens, inner), dtype=x.dtype, device=x.device)
    config = channel_scan_config(inner, triton.next_power_of_2(state_dim))
    _mamba1_scan_kernel[(triton.cdiv(inner, config.values), num_seqs)](
        x,
        dt,
        a,
        b,
        c,
        d,
        dt_bias,
        pool,
        slots,
        query_start_loc,
        out,
        math.inf,
        num_seqs,
        num_tokens,
        INNER=inner,
        STATE_DIM=state_dim,
        X_STRIDE=x.stride(0),
        DT_STRIDE=dt.stride(0),
        B_STRIDE=b.stride(0),
        C_STRIDE=c.stride(0),
        COLUMNS=config.values,
        NUMBERS=triton.next_power_of_2(state_dim),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **dependent_launch(device),
    )
    return out
