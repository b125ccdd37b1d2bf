"""Products of int8 or FP8 numbers with a scale for each row and one for each output feature."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._matmul import (
    Epilogue,
    check_product,
    first_of_tile,
    launch_matmul,
    load_tile,
    store_tile,
)
from paged_kernels.device import device_of
from paged_kernels.dtypes import QUANTIZED_DTYPES, check_float8
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning import scaled_matmul_config

_MAX_INT8_WIDTH = 2**31 // 2**14 - 1  # columns whose products certainly fit into an int32
_BLOCK_K = 128


@triton.jit
def _sum_split(
    x_ptr,
    w_ptr,
    num_rows,
    num_features,
    split,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUM: tl.constexpr,
):
    """Return the sums [FEATURES, ROWS] over one split of K, in int32 or float32."""
    begin = split * SPLIT_SIZE
    total = tl.zeros([FEATURES, ROWS], SUM)
    for start in range(begin, tl.minimum(begin + SPLIT_SIZE, K), BLOCK_K):
        w = load_tile(w_ptr, num_features, start, K, FEATURES, BLOCK_K, N % FEATURES == 0)
        x = load_tile(x_ptr, num_rows, start, K, ROWS, BLOCK_K)
        # Hopper's tensor cores add FP8 products with 14 bits: every 128 go to a float32 sum.
        total = tl.dot(w, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K, out_dtype=SUM)
    return total


@triton.jit(do_not_specialize=["rows"])
def _scaled_matmul_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    row_scales_ptr,
    feature_scales_ptr,
    bias_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTIAL: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one tile, all splits of K or one."""
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    first_row, first_feature = first_of_tile(rows, N, ROWS, FEATURES)
    x_ptr += first_row.to(tl.int64) * K
    w_ptr += first_feature.to(tl.int64) * K
    num_rows, num_features = rows - first_row, N - first_feature
    first_split = tl.program_id(1)
    total = tl.zeros([FEATURES, ROWS], SUM)
    for split in range(first_split, first_split + SPLITS):
        total += _sum_split(
            x_ptr, w_ptr, num_rows, num_features, split,
            N, K, SPLIT_SIZE, ROWS, FEATURES, BLOCK_K, SUM,
        )  # fmt: skip
    store_tile(
        out_ptr, total, row_scales_ptr, feature_scales_ptr, bias_ptr,
        rows, first_row, first_feature, first_split, N, PARTIAL,
    )  # fmt: skip


def scaled_matmul(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute sum(x * w) * x_scale * w_scale + bias for each row and output feature.

    Sums of int8 products are exact, in int32. Sums of FP8 products are in float32, added in an
    order that follows from N and K alone. The rest is computed in float32 and rounded once to
    `out_dtype`. So a row's result does not depend on the number of rows, to the last bit.

    Args:
        x: [rows, K] int8 or float8_e4m3fn, as from `quantize_rows`. In int8 K is at most 131071.
        x_scales: [rows] float32.
        w: [N, K], dtype of `x`.
        w_scales: [N] float32.
        bias: [N] bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        [rows, N] in `out_dtype`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or the device has
            no float8_e4m3fn (compute capability below 8.9).
    """
    check_tensor("x", x, (None, None), QUANTIZED_DTYPES, like=x)
    arch = device_of("x", x).arch
    check_float8("x", x.dtype, arch)
    rows, width = x.shape
    exact = x.dtype != torch.int8 or width <= _MAX_INT8_WIDTH
    check(exact, "x", f"in int8 must have at most {_MAX_INT8_WIDTH} columns, got {width}")
    check_tensor("w", w, (None, width), x.dtype, like=x)
    features = len(w)
    check_product(x, features, bias, out_dtype)
    check_tensor("x_scales", x_scales, (rows,), torch.float32, like=x)
    check_tensor("w_scales", w_scales, (features,), torch.float32, like=x)
    return launch_matmul(
        _scaled_matmul_kernel,
        x,
        (w,),
        features,
        Epilogue(x_scales, w_scales, bias),
        scaled_matmul_config(rows),
        out_dtype,
        torch.int32 if x.dtype == torch.int8 else torch.float32,
        BLOCK_K=_BLOCK_K,
    )
