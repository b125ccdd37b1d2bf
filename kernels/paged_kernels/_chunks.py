"""The parts that kernels share which compute chunks of rows by matrix products.

Sequences with more than `FEW_ROWS` rows in a step are computed in chunks of `CHUNK` rows. They are
aligned to positions in the text: one begins at each multiple of `CHUNK`. If the last one has at
most `FEW_ROWS` rows, these are computed row by row, like sequences of few rows.

So no bit of a result or a float32 state depends on the division of a text into steps if all steps
begin at multiples of `CHUNK`, or if none has more than `FEW_ROWS` rows. Other divisions change
results by rounding. The other sequences of a step never matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels import state_chunks
from paged_kernels.errors import check, check_tensor

CHUNK = tl.constexpr(state_chunks.CHUNK_ROWS)
FEW_ROWS = tl.constexpr(state_chunks.FEW_ROWS)


@triton.jit
def rows_in_chunks(num_rows, seq_len):
    """Return the number of first rows of a sequence that are computed in chunks.

    Args:
        num_rows: rows of the sequence in this step.
        seq_len: its rows in this and all earlier steps.
    """
    last = (seq_len - 1) % CHUNK + 1
    chunked = tl.where(last <= FEW_ROWS, num_rows - last, num_rows)
    return tl.where(num_rows <= FEW_ROWS, 0, chunked)


@triton.jit
def chunks_of(starts_ptr, seq_lens_ptr, seq):
    """Return the first row of a sequence, its position, and the number of rows in chunks."""
    start = tl.load(starts_ptr + seq)
    num_rows = tl.load(starts_ptr + seq + 1) - start
    seq_len = tl.load(seq_lens_ptr + seq)
    count = rows_in_chunks(num_rows, seq_len)
    return start, tl.where(count > 0, seq_len - num_rows, 0), count


@triton.jit
def decays_between(decay):
    """Return exp of the sums of `decay` over rows j + 1 to i, in [CHUNK, CHUNK]; 0 for j > i.

    Sums are not differences of sums from the first row on, which may be large and cancel.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    sums = tl.cumsum(tl.where(i > j, decay[:, None], 0.0), 0)
    return tl.where(i >= j, tl.exp(sums), 0.0)


@triton.jit
def decays_around(decay):
    """Return exp of the sums of `decay` [CHUNK] over rows up to i, and over those after i."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    until = tl.sum(tl.where(i >= j, decay[None, :], 0.0), 1)
    after = tl.sum(tl.where(j > i, decay[None, :], 0.0), 1)
    return tl.exp(until), tl.exp(after)


@triton.jit
def product(a, b, total, MODEL: tl.constexpr):
    """Return a @ b + total in float32 on the tensor cores of a model's 16-bit dtype.

    Factors have this dtype or are float32. These are multiplied as the sum of two 16-bit numbers,
    because rounding them to one would cost more accuracy than the others have.
    """
    if a.dtype == MODEL and b.dtype == MODEL:
        return tl.dot(a, b, total)
    elif a.dtype == MODEL:
        high, low = _two_parts(b, MODEL)
        return tl.dot(a, high, tl.dot(a, low, total))
    else:
        high, low = _two_parts(a, MODEL)
        return product_of_parts(high, low, b, total, MODEL)


@triton.jit
def product_of_parts(a_high, a_low, b, total, MODEL: tl.constexpr):
    """Return (a_high + a_low) @ b + total, as `product` does."""
    if b.dtype == MODEL:
        return tl.dot(a_high, b, tl.dot(a_low, b, total))
    else:
        high, low = _two_parts(b, MODEL)
        total = tl.dot(a_high, low, tl.dot(a_low, high, total))
        return tl.dot(a_high, high, total)


@triton.jit
def _two_parts(values, MODEL: tl.constexpr):
    """Return two 16-bit numbers with almost the sum of a float32 number."""
    high = values.to(MODEL)
    return high, (values - high.to(tl.float32)).to(MODEL)


@triton.jit
def store_parts(ptrs, size, matrix, mask, MODEL: tl.constexpr):
    """Store a matrix as two of 16 bits, the second one `size` numbers after the first."""
    high, low = _two_parts(matrix, MODEL)
    tl.store(ptrs, high, mask=mask)
    tl.store(ptrs + size, low, mask=mask)


def check_lengths(x: Tensor, seq_lens: Tensor | None, num_seqs: int, num_decodes: int) -> None:
    """Check the arguments that only steps with chunks have.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    if seq_lens is not None:
        check_tensor("seq_lens", seq_lens, (num_seqs,), torch.int32, like=x)
    in_range = 0 <= num_decodes <= num_seqs
    check(in_range, "num_decodes", f"must be from 0 to the sequences, got {num_decodes}")
