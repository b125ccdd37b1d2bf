"""The parts that kernels of layers with a state for each sequence share.

The layout of a step: the rows of sequence s are `query_start_loc[s]:query_start_loc[s + 1]`, and
`slots[s]` has the slot of the pool that its state is read from and the one that it is written to.
Slot 0 is read as zeros. Rows that belong to no sequence, which pad a step, get zeros.

Each of these kernels computes a row from the one before it, with one launch configuration for each
model and sums in one order. So no bit depends on the other sequences of a step, or on the steps
that a text was divided into, as far as a state has the precision of the sums: float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor


@triton.jit
def find_tile(starts_ptr, tile, first_seq, num_seqs, ROWS: tl.constexpr, SPARE: tl.constexpr):
    """Return the sequence that a tile of rows belongs to, and the number of the tile in it.

    Sequence s has tiles from (start[s] - start[first_seq]) // ROWS + (s - first_seq) * SPARE on, so
    at least SPARE more than its whole tiles. The last one has those of all rows after its start.
    """
    base = tl.load(starts_ptr + first_seq)
    low = first_seq
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(starts_ptr + middle) - base) // ROWS + (middle - first_seq) * SPARE
        if begins <= tile:
            low = middle
        else:
            high = middle
    begins = (tl.load(starts_ptr + low) - base) // ROWS + (low - first_seq) * SPARE
    return low, tile - begins


@triton.jit
def load_state(pool_ptr, offsets, slot, SIZE: tl.constexpr, mask):
    """Return numbers of the state in a slot, in float32; zeros for slot 0.

    Args:
        offsets: the offsets of the numbers within a state of SIZE numbers.
    """
    at = slot.to(tl.int64) * SIZE + offsets
    return tl.load(pool_ptr + at, mask=mask & (slot != 0), other=0.0).to(tl.float32)


@triton.jit
def store_state(pool_ptr, offsets, slot, SIZE: tl.constexpr, state, mask):
    """Write numbers of the state in a slot, rounded to the dtype of the pool."""
    at = slot.to(tl.int64) * SIZE + offsets
    tl.store(pool_ptr + at, state.to(pool_ptr.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows_of_no_sequence(
    out_ptr, offsets, seq, num_seqs, num_tokens, starts_ptr, STRIDE: tl.constexpr, mask
):
    """Write zeros to some columns of the rows that follow the last sequence.

    The programs of sequence `seq` write each `num_seqs`-th of these rows.

    Args:
        offsets: the columns.
    """
    zeros = tl.zeros(offsets.shape, tl.float32).to(out_ptr.dtype.element_ty)
    for row in range(tl.load(starts_ptr + num_seqs) + seq, num_tokens, num_seqs):
        tl.store(out_ptr + tl.cast(row, tl.int64) * STRIDE + offsets, zeros, mask=mask)


def check_step(x: Tensor, slots: Tensor, query_start_loc: Tensor) -> int:
    """Check the slots and rows of a step against rows that are already checked.

    Returns:
        The number of sequences.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("slots", slots, (None, 2), torch.int32, like=x)
    num_seqs = len(slots)
    check(num_seqs > 0, "slots", "must have at least one sequence")
    check_tensor("query_start_loc", query_start_loc, (num_seqs + 1,), torch.int32, like=x)
    return num_seqs


def check_pool(pool: Tensor, x: Tensor, *sizes: int) -> None:
    """Check that a pool on the device of `x` has states of these sizes.

    Raises:
        ArgumentError: the pool has the wrong shape, dtype, device or layout.
    """
    check_tensor("pool", pool, (None, *sizes), MODEL_DTYPES, like=x)


def check_rows(
    name: str,
    rows: Tensor,
    like: Tensor,
    *sizes: int | None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """Check rows that may be strided, by multiples of 16 bytes.

    Args:
        name: the argument.
        rows: the rows.
        like: the tensor with the device, and the dtype if there are no `dtypes`.
        sizes: the shape; None allows any size.
        dtypes: the permitted dtypes.

    Raises:
        ArgumentError: the tensor has the wrong shape, dtype, device or layout.
    """
    contiguous = rows.is_contiguous()  # then rows may have any size
    check_tensor(name, rows, sizes, dtypes or (like.dtype,), like=like, contiguous=contiguous)


def check_heads(name: str, heads: Tensor, like: Tensor, *sizes: int | None) -> None:
    """Check [num_tokens, heads, dim] with dense heads and rows that may be strided.

    Raises:
        ArgumentError: the tensor has the wrong shape, dtype, device or layout.
    """
    check_rows(name, heads, like, *sizes)
    dense = heads.shape[1] == 1 or heads.stride(1) == heads.shape[2]
    check(dense, name, f"must have heads one after the other, got strides {heads.stride()}")
