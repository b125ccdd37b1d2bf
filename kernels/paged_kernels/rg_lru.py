"""The real-gated linear recurrent unit: a state of one number for each channel.

De et al., "Griffin" (2024), section 2.4. `_states.py` says what is promised about the bits of
results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._activation import sigmoid
from paged_kernels._elementary import one_minus_exp, softplus
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

_SHARPNESS = tl.constexpr(8.0)  # multiplies the logarithm of the decay


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _rg_lru_kernel(
    x_ptr,
    input_ptr,
    recurrent_ptr,
    param_ptr,
    pool_ptr,
    slots_ptr,
    starts_ptr,
    out_ptr,
    num_seqs,
    num_tokens,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    RECURRENT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: a sequence and a tile of its channels, row by row."""
    wait_for_launch_before(DEPENDENT)
    seq = tl.program_id(1)
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = channel < WIDTH
    zero_rows_of_no_sequence(out_ptr, channel, seq, num_seqs, num_tokens, starts_ptr, WIDTH, real)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if start == end:
        return
    source, target = tl.load(slots_ptr + 2 * seq), tl.load(slots_ptr + 2 * seq + 1)
    state = load_state(pool_ptr, channel, source, WIDTH, real)
    rate = softplus(tl.load(param_ptr + channel, mask=real, other=0.0).to(tl.float32))
    for index in tl.range(start, end, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        x = tl.load(x_ptr + row * X_STRIDE + channel, mask=real, other=0.0).to(tl.float32)
        gate_ptrs = input_ptr + row * INPUT_STRIDE + channel
        input_gate = tl.load(gate_ptrs, mask=real, other=0.0).to(tl.float32)
        gate_ptrs = recurrent_ptr + row * RECURRENT_STRIDE + channel
        recurrent_gate = tl.load(gate_ptrs, mask=real, other=0.0).to(tl.float32)
        log_decay = -_SHARPNESS * sigmoid(recurrent_gate) * rate
        factor = tl.sqrt(one_minus_exp(2.0 * log_decay))
        # The first row of a text has nothing to be weighed against.
        factor = tl.where((source == 0) & (row == start), 1.0, factor)
        state = state * tl.exp(log_decay) + factor * (sigmoid(input_gate) * x)
        tl.store(out_ptr + row * WIDTH + channel, state.to(out_ptr.dtype.element_ty), mask=real)
    store_state(pool_ptr, channel, target, WIDTH, state, real)


def rg_lru(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    recurrent_param: Tensor,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Return the states after each row, computed in float32, rounded once.

    With log(a) = -8 sigmoid(recurrent_gate) softplus(recurrent_param), a row turns the state h of a
    channel into a h + sqrt(1 - a^2) sigmoid(input_gate) x. The first row of a text, which reads
    slot 0, has a factor of 1 in place of the root.

    Args:
        x: [num_tokens, width] bfloat16, float16 or float32. Its rows, and those of the gates, may
            be strided by multiples of 16 bytes.
        input_gate: like `x`, before the sigmoid.
        recurrent_gate: like `x`, before the sigmoid.
        recurrent_param: [width], dtype of `x` or float32.
        pool: [num_slots, width] bfloat16, float16 or float32; updated.
        slots: [num_seqs, 2] int32, the slot that a state is read from and the one that it is
            written to, which may be equal. Slot 0 is read as zeros.
        query_start_loc: [num_seqs + 1] int32; a sequence may have no rows, and then no state is
            written.

    Returns:
        [num_tokens, width], dtype of `x`; zeros in rows of no sequence.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_rows("x", x, x, None, None, dtypes=MODEL_DTYPES)
    device = device_of("x", x)
    num_tokens, width = x.shape
    check_rows("input_gate", input_gate, x, num_tokens, width)
    check_rows("recurrent_gate", recurrent_gate, x, num_tokens, width)
    check_tensor("recurrent_param", recurrent_param, (width,), (x.dtype, torch.float32), like=x)
    check_pool(pool, x, width)
    num_seqs = check_step(x, slots, query_start_loc)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    config = channel_scan_config(width, 1)
    _rg_lru_kernel[(triton.cdiv(width, config.values), num_seqs)](
        x,
        input_gate,
        recurrent_gate,
        recurrent_param,
        pool,
        slots,
        query_start_loc,
        out,
        num_seqs,
        num_tokens,
        WIDTH=width,
        X_STRIDE=x.stride(0),
        INPUT_STRIDE=input_gate.stride(0),
        RECURRENT_STRIDE=recurrent_gate.stride(0),
        COLUMNS=config.values,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **dependent_launch(device),
    )
    return out
