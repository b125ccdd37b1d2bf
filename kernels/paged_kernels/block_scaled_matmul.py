"""Products of FP8 numbers with scales for blocks of weights and for groups of a row.

The layout of DeepSeek-V3's weights: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section
3.3.2.
"""

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
from paged_kernels.dependent_launch import wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import check_float8
from paged_kernels.errors import check_tensor
from paged_kernels.tuning.products import block_scaled_matmul_config

BLOCK_SIZE = 128
"""Features and columns of a block of weights with one scale, and columns of a group of a row."""


@triton.jit
def _load_scales(
    x_scales_ptr, w_scales_ptr, block, num_rows, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):
    """Load the scales [ROWS] of the products over one block of columns."""
    row = tl.arange(0, ROWS)
    x_scales = tl.load(x_scales_ptr + block + row * BLOCKS, mask=row < num_rows, other=0.0)
    return x_scales * tl.load(w_scales_ptr + block)


@triton.jit
def _sum_split(
    x_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    num_rows,
    num_features,
    split,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the scaled sums [FEATURES, ROWS] over one split of K."""
    BLOCKS: tl.constexpr = triton.cdiv(K, BLOCK)
    begin = split * SPLIT_SIZE
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    # Scales are loaded a block ahead: the loop's pipeline has only what is multiplied.
    scales = _load_scales(x_scales_ptr, w_scales_ptr, begin // BLOCK, num_rows, BLOCKS, ROWS)
    for start in range(begin, tl.minimum(begin + SPLIT_SIZE, K), BLOCK):
        following = tl.minimum(start // BLOCK + 1, BLOCKS - 1)
        ahead = _load_scales(x_scales_ptr, w_scales_ptr, following, num_rows, BLOCKS, ROWS)
        w = load_tile(w_ptr, num_features, start, K, FEATURES, BLOCK, N % FEATURES == 0)
        x = load_tile(x_ptr, num_rows, start, K, ROWS, BLOCK)
        product = tl.dot(w, tl.trans(x), max_num_imprecise_acc=BLOCK)
        total = tl.fma(product, scales[None, :], total)
        scales = ahead
    return total


@triton.jit(do_not_specialize=["rows"])
def _block_scaled_matmul_kernel(
    x_ptr,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
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
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one tile, all splits of K or one. A tile's features share a block's scale."""
    wait_for_launch_before(DEPENDENT)
    BLOCKS: tl.constexpr = triton.cdiv(K, BLOCK)
    first_row, first_feature = first_of_tile(rows, N, ROWS, FEATURES)
    x_ptr += first_row.to(tl.int64) * K
    w_ptr += first_feature.to(tl.int64) * K
    x_scales_ptr += first_row.to(tl.int64) * BLOCKS
    w_scales_ptr += first_feature // BLOCK * BLOCKS
    num_rows, num_features = rows - first_row, N - first_feature
    first_split = tl.program_id(1)
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for split in range(first_split, first_split + SPLITS):
        total += _sum_split(
            x_ptr, w_ptr, x_scales_ptr, w_scales_ptr, num_rows, num_features, split,
            N, K, SPLIT_SIZE, ROWS, FEATURES, BLOCK,
        )  # fmt: skip
    store_tile(
        out_ptr, total, row_scales_ptr, feature_scales_ptr, bias_ptr,
        rows, first_row, first_feature, first_split, N, PARTIAL,
    )  # fmt: skip


def block_scaled_matmul(
    x: Tensor,
    x_scales: Tensor,
    w: Tensor,
    w_scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply FP8 rows by FP8 weights with scales for blocks, with float32 sums.

    The products of 128 columns are added, multiplied by the product of the scales of their row's
    group and of their block of weights, and added to the sum, which is rounded to `out_dtype`
    after the bias. A row's result does not depend on the number of rows: splits and steps along K
    follow from N and K alone.

    Args:
        x: [rows, K] float8_e4m3fn.
        x_scales: [rows, ceil(K / 128)] float32, as from `quantize_rows` with groups of 128.
        w: [N, K] float8_e4m3fn.
        w_scales: [ceil(N / 128), ceil(K / 128)] float32, a factor for each block of `w`.
        bias: [N] bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        [rows, N] in `out_dtype`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or the device has
            no float8_e4m3fn (compute capability below 8.9).
    """
    check_tensor("x", x, (None, None), torch.float8_e4m3fn, like=x)
    arch = device_of("x", x).arch
    check_float8("x", x.dtype, arch)
    rows, width = x.shape
    check_tensor("w", w, (None, width), x.dtype, like=x)
    features = len(w)
    check_product(x, features, bias, out_dtype)
    blocks = triton.cdiv(width, BLOCK_SIZE)
    check_tensor("x_scales", x_scales, (rows, blocks), torch.float32, like=x)
    shape = triton.cdiv(features, BLOCK_SIZE), blocks
    check_tensor("w_scales", w_scales, shape, torch.float32, like=x)
    return launch_matmul(
        _block_scaled_matmul_kernel,
        x,
        (w, x_scales, w_scales),
        features,
        Epilogue(bias=bias),
        block_scaled_matmul_config(rows),
        out_dtype,
        BLOCK=BLOCK_SIZE,
    )
