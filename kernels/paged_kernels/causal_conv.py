"""Short causal convolutions of each channel, for layers that keep the last inputs of a sequence.

They precede the states of Mamba (Gu and Dao, 2023, section 3.4) and its successors, and are whole
layers of LFM2. A result needs only some inputs, so all rows are computed at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._activation import sigmoid
from paged_kernels._states import check_pool, check_rows, check_step, find_tile
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning.states import causal_conv_config


@triton.jit
def _load_inputs(
    x_ptr, state_ptr, row, start, end, channel, mask, X_STRIDE: tl.constexpr, WIDTH: tl.constexpr
):
    """Return inputs in float32: a row of the step, or of those before it, which the state has.

    Args:
        x_ptr: the first row of the step.
        state_ptr: the state of the sequence.
        row: the rows, possibly before `start`; from `end` on they are zeros.
        channel: the channels, broadcast against the rows.
    """
    new = mask & (row >= start) & (row < end)
    values = tl.load(x_ptr + row.to(tl.int64) * X_STRIDE + channel, mask=new, other=0.0)
    old = mask & (row < start)
    at = channel * (WIDTH - 1) + row - start + (WIDTH - 1)
    return values.to(tl.float32) + tl.load(state_ptr + at, mask=old, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _causal_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    pool_ptr,
    slots_ptr,
    starts_ptr,
    out_ptr,
    num_seqs,
    num_tokens,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: a tile of the rows of a sequence, and of the channels.

    A tile has at least as many rows as a state, so only programs of the first tile read the state,
    and they also write it.
    """
    wait_for_launch_before(DEPENDENT)
    seq, tile = find_tile(starts_ptr, tl.program_id(0), 0, num_seqs, ROWS, 1)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    limit = tl.where(seq == num_seqs - 1, num_tokens, end)
    first = start + tile * ROWS
    if first >= limit:
        return
    source = tl.load(slots_ptr + 2 * seq)
    state_ptr = pool_ptr + source.to(tl.int64) * (CHANNELS * (WIDTH - 1))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < CHANNELS
    row = first + tl.arange(0, ROWS)[:, None]
    known = inside[None, :] & (row < end)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tap in tl.static_range(WIDTH):
        needed = row - (WIDTH - 1 - tap)
        mask = known & ((needed >= start) | (source != 0))
        inputs = _load_inputs(
            x_ptr, state_ptr, needed, start, end, column[None, :], mask, X_STRIDE, WIDTH
        )
        weight = tl.load(weight_ptr + column * WIDTH + tap, mask=inside, other=0.0)
        sums += inputs * weight.to(tl.float32)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        sums *= sigmoid(sums)
    sums = tl.where(row < end, sums, 0.0).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + row.to(tl.int64) * CHANNELS + column[None, :]
    tl.store(out_ptrs, sums, mask=inside[None, :] & (row < limit))

    if (tile == 0) & (start < end):
        target = tl.load(slots_ptr + 2 * seq + 1)
        new_ptr = pool_ptr + target.to(tl.int64) * (CHANNELS * (WIDTH - 1))
        tl.debug_barrier()  # all threads have read the old state, which may be overwritten now
        for index in tl.static_range(WIDTH - 1):
            last = end - (WIDTH - 1) + index
            last_mask = inside & ((last >= start) | (source != 0))
            values = _load_inputs(
                x_ptr, state_ptr, last, start, end, column, last_mask, X_STRIDE, WIDTH
            )
            # A number that is overwritten here is older than all that are still to be read.
            at = column * (WIDTH - 1) + index
            tl.store(new_ptr + at, values.to(pool_ptr.dtype.element_ty), mask=inside)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    *,
    silu: bool,
) -> Tensor:
    """Add each channel's last inputs times their weights, in float32, rounded once.

    Results depend on the inputs alone, to the last bit, if the pool has the dtype of `x`.

    Args:
        x: [num_tokens, channels] bfloat16, float16 or float32. Rows may be strided by multiples of
            16 bytes.
        weight: [channels, width], dtype of `x` or float32; the last column is for the row itself.
        bias: [channels], dtype of `weight`, added to the sums, or None.
        pool: [num_slots, channels, width - 1] bfloat16, float16 or float32, the last inputs of each
            sequence, oldest first; updated.
        slots: [num_seqs, 2] int32, the slot that a state is read from and the one that it is
            written to, which may be equal. Slot 0 is read as zeros.
        query_start_loc: [num_seqs + 1] int32; a sequence may have no rows, and then no state is
            written.
        silu: whether to apply SiLU to the sums.

    Returns:
        [num_tokens, channels], dtype of `x`; zeros in rows of no sequence.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_rows("x", x, x, None, None, dtypes=MODEL_DTYPES)
    device = device_of("x", x)
    num_tokens, channels = x.shape
    check_tensor("weight", weight, (channels, None), (x.dtype, torch.float32), like=x)
    width = weight.shape[1]
    check(width > 1, "weight", "must have at least two columns, one for the row itself")
    if bias is not None:
        check_tensor("bias", bias, (channels,), weight.dtype, like=x)
    check_pool(pool, x, channels, width - 1)
    num_seqs = check_step(x, slots, query_start_loc)
    out = torch.empty((num_tokens, channels), dtype=x.dtype, device=x.device)
    config = causal_conv_config(channels, width, few=num_tokens <= 4 * num_seqs)
    tiles = num_tokens // config.rows + num_seqs
    _causal_conv_kernel[(tiles, triton.cdiv(channels, config.columns))](
        x,
        weight,
        bias,
        pool,
        slots,
        query_start_loc,
        out,
        num_seqs,
        num_tokens,
        CHANNELS=channels,
        WIDTH=width,
        X_STRIDE=x.stride(0),
        SILU=silu,
        ROWS=config.rows,
        COLUMNS=config.columns,
        num_warps=config.num_warps,
        **dependent_launch(device),
    )
    return out
