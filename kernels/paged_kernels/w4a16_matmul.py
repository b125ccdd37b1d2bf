"""Products of 16-bit activations with 4-bit weights that are unpacked in registers.

The rounding of weights to a grid with a scale for each group: Frantar et al., "GPTQ" (2022),
section 4.
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
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.int4 import PER_WORD
from paged_kernels.tuning import w4a16_matmul_config

GROUP_SIZES = (32, 64, 128)
_BLOCK_K = 128  # columns per iteration where a row is one group
_MIDDLE = tl.constexpr(8)  # the stored number of a zero weight, for weights without zero points
# The bits of the float32 2**23. It has no bits for a fraction: in the lowest bits is an integer.
_INTEGERS = tl.constexpr(0x4B000000)
_FIRST_INTEGER = tl.constexpr(float(2**23))


@triton.jit
def _unpacked(words, zeros, dtype: tl.constexpr):
    """Unpack words [FEATURES, WORDS] and subtract zeros [FEATURES]: exact numbers from -15 to 15.

    A stored number becomes a float32 by an `or` in place of a conversion, which is slow.
    """
    shifts = tl.arange(0, 8) * 4
    stored = (words[:, :, None] >> shifts[None, None, :]) & 15
    stored = tl.reshape(stored, [words.shape[0], 8 * words.shape[1]])
    numbers = (stored | _INTEGERS).to(tl.float32, bitcast=True)
    return (numbers - zeros[:, None]).to(dtype)


@triton.jit
def _load_zeros(zero_points_ptr, block, num_features, GROUPS: tl.constexpr, FEATURES: tl.constexpr):
    """Load what `_unpacked` subtracts from the features' numbers in one block of columns."""
    if zero_points_ptr is None:
        zeros = tl.full([FEATURES], _MIDDLE, tl.float32)
    else:
        feature = tl.arange(0, FEATURES)
        group = tl.minimum(block, GROUPS - 1)
        pointers = zero_points_ptr + group // 8 + feature * tl.cdiv(GROUPS, 8)
        words = tl.load(pointers, mask=feature < num_features, other=0)
        zeros = ((words >> (group % 8 * 4)) & 15).to(tl.float32)
    return zeros + _FIRST_INTEGER


@triton.jit
def _load_scales(scales_ptr, block, num_features, GROUPS: tl.constexpr, FEATURES: tl.constexpr):
    """Load the features' scales [FEATURES] in one block of columns, the last one's beyond it."""
    if scales_ptr is None:
        return tl.full([FEATURES], 1.0, tl.float32)
    else:
        feature = tl.arange(0, FEATURES)
        pointers = scales_ptr + tl.minimum(block, GROUPS - 1) + feature * GROUPS
        return tl.load(pointers, mask=feature < num_features, other=0.0).to(tl.float32)


@triton.jit
def _sum_split(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zero_points_ptr,
    num_rows,
    num_features,
    split,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums [FEATURES, ROWS] over one split of K, scaled unless there is one group."""
    WORDS: tl.constexpr = tl.cdiv(K, 8)
    begin = split * SPLIT_SIZE
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    # Scales are loaded a group ahead: the loop's pipeline has only what is multiplied.
    scales = _load_scales(scales_ptr, begin // BLOCK_K, num_features, GROUPS, FEATURES)
    for start in range(begin, tl.minimum(begin + SPLIT_SIZE, K), BLOCK_K):
        block = start // BLOCK_K
        ahead = _load_scales(scales_ptr, block + 1, num_features, GROUPS, FEATURES)
        zeros = _load_zeros(zero_points_ptr, block, num_features, GROUPS, FEATURES)
        words = load_tile(
            packed_ptr, num_features, start // 8, WORDS, FEATURES, BLOCK_K // 8, N % FEATURES == 0
        )
        x = load_tile(x_ptr, num_rows, start, K, ROWS, BLOCK_K)
        w = _unpacked(words, zeros, x.dtype)
        if GROUPS == 1:
            total = tl.dot(w, tl.trans(x), total)
        else:
            total = tl.fma(tl.dot(w, tl.trans(x)), scales[:, None], total)
        scales = ahead
    return total


@triton.jit(do_not_specialize=["rows"])
def _w4a16_matmul_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zero_points_ptr,
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
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one tile, all splits of K or one."""
    first_row, first_feature = first_of_tile(rows, N, ROWS, FEATURES)
    x_ptr += first_row.to(tl.int64) * K
    packed_ptr += first_feature.to(tl.int64) * tl.cdiv(K, 8)
    if scales_ptr is not None:
        scales_ptr += first_feature.to(tl.int64) * GROUPS
    if zero_points_ptr is not None:
        zero_points_ptr += first_feature.to(tl.int64) * tl.cdiv(GROUPS, 8)
    num_rows, num_features = rows - first_row, N - first_feature
    first_split = tl.program_id(1)
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for split in range(first_split, first_split + SPLITS):
        total += _sum_split(
            x_ptr, packed_ptr, scales_ptr, zero_points_ptr, num_rows, num_features, split,
            N, K, SPLIT_SIZE, ROWS, FEATURES, GROUPS, BLOCK_K,
        )  # fmt: skip
    store_tile(
        out_ptr, total, row_scales_ptr, feature_scales_ptr, bias_ptr,
        rows, first_row, first_feature, first_split, N, PARTIAL,
    )  # fmt: skip


def w4a16_matmul(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply rows by the 4-bit weights (stored number - zero point) * scale, and add a bias.

    The difference is exact in the dtype of `x`. Products of a group's numbers are added in
    float32 and multiplied by the scale in float32, so no weight is rounded; the result is rounded
    once. A row's result does not depend on the number of rows: the splits of K and the order of
    all sums follow from N, K and the group size alone, also for many rows, for which one program
    adds the splits that are programs of their own for few.

    Args:
        x: [rows, K] bfloat16 or float16.
        packed: [N, ceil(K / 8)] int32, as from `paged_kernels.int4.pack_int4`.
        scales: [N, groups] bfloat16, float16 or float32, groups = ceil(K / group_size).
        group_size: number of consecutive columns that share a scale: 32, 64, 128, or -1 for one
            scale for each row of the weights.
        zero_points: [N, ceil(groups / 8)] int32, from 0 to 15, packed like the weights; 8
            everywhere if None.
        bias: [N] bfloat16, float16 or float32.

    Returns:
        [rows, N] in the dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or there are no
            groups of that size.
    """
    check_tensor("x", x, (None, None), (torch.bfloat16, torch.float16), like=x)
    device_of("x", x)
    rows, width = x.shape
    check_tensor("packed", packed, (None, triton.cdiv(width, PER_WORD)), torch.int32, like=x)
    features = len(packed)
    check_product(x, features, bias, x.dtype)
    known = group_size == -1 or group_size in GROUP_SIZES
    check(known, "group_size", f"must be 32, 64, 128 or -1, got {group_size}")
    groups = 1 if group_size == -1 else triton.cdiv(width, group_size)
    check_tensor("scales", scales, (features, groups), MODEL_DTYPES, like=x)
    if zero_points is not None:
        shape = features, triton.cdiv(groups, PER_WORD)
        check_tensor("zero_points", zero_points, shape, torch.int32, like=x)
    block = _BLOCK_K if groups == 1 else group_size
    return launch_matmul(
        _w4a16_matmul_kernel,
        x,
        (packed, scales if groups > 1 else None, zero_points),
        features,
        Epilogue(feature_scales=scales if groups == 1 else None, bias=bias),
        w4a16_matmul_config(rows, block),
        x.dtype,
        GROUPS=groups,
        BLOCK_K=block,
    )
