"""Merge of attention results of the same queries over different keys.

Ye et al., 2025, section 2.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._softmax import LOWEST
from paged_kernels.errors import check_tensor
from paged_kernels.paged_decode import check_out, check_q

_ROWS = 16
_NUM_WARPS = 4


def merge_attention(
    first: Tensor,
    first_lse: Tensor,
    second: Tensor,
    second_lse: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Merge attention results over two disjoint sets of keys into the result over both.

    Args:
        first: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32.
        first_lse: [num_tokens, num_heads] float32, natural log-sum-exp; minus infinity for no keys.
        second: like `first`.
        second_lse: like `first_lse`.
        out: like `first`, filled and returned; may be `first` or `second`.

    Raises:
        ArgumentError: an argument is invalid; the error names it.
    """
    check_q(first, "first")
    rows = tuple(first.shape[:2])
    check_tensor("first", first, tuple(first.shape), first.dtype, like=first)
    check_tensor("second", second, tuple(first.shape), first.dtype, like=first)
    check_tensor("first_lse", first_lse, rows, torch.float32, like=first)
    check_tensor("second_lse", second_lse, rows, torch.float32, like=first)
    out = check_out(first, out, None)
    check_tensor("out", out, tuple(first.shape), first.dtype, like=first)
    num_rows, dim = first.shape[0] * first.shape[1], first.shape[2]
    if num_rows:
        _merge_kernel[(triton.cdiv(num_rows, _ROWS),)](
            first,
            first_lse,
            second,
            second_lse,
            out,
            num_rows,
            DIM=dim,
            DIM_PADDED=triton.next_power_of_2(dim),
            ROWS=_ROWS,
            num_warps=_NUM_WARPS,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    first_ptr,
    first_lse_ptr,
    second_ptr,
    second_lse_ptr,
    out_ptr,
    num_rows,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    dims = tl.arange(0, DIM_PADDED)
    kept = real[:, None] & (dims < DIM)[None, :]
    at = row[:, None] * DIM + dims[None, :]
    # Clamped to finite, so that two results without keys differ by 0 instead of NaN.
    first_lse = tl.maximum(tl.load(first_lse_ptr + row, mask=real, other=0.0), LOWEST)
    second_lse = tl.maximum(tl.load(second_lse_ptr + row, mask=real, other=0.0), LOWEST)
    first = tl.load(first_ptr + at, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + at, mask=kept, other=0.0).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(second_lse - first_lse)))[:, None]
    merged = first * share + second * (1.0 - share)
    tl.store(out_ptr + at, merged.to(out_ptr.dtype.element_ty), mask=kept)
