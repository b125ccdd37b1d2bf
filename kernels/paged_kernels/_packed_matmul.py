"""Products of 16-bit activations with weights of 4 or 8 bits that are unpacked in registers.

Numbers are packed into 32-bit words along the rows, the first one in the lowest bits. The rounding
of weights to a grid with a scale for each group: Frantar et al., "GPTQ" (2022), section 4.
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
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning import packed_matmul_config

GROUP_SIZES = (32, 64, 128)
_BLOCK_BITS = 512  # bits of a row per iteration where it is one group
# The bits of the float32 2**23. It has no bits for a fraction: in the lowest bits is an integer.
_INTEGERS = tl.constexpr(0x4B000000)
_FIRST_INTEGER = tl.constexpr(float(2**23))
_FLOAT8_TO_FLOAT32 = tl.constexpr(float(2**120))  # by the difference of the exponents' biases


@triton.jit
def _unpacked(words, zeros, dtype: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr):
    """Unpack words [FEATURES, WORDS] to exact numbers: differences to zeros [FEATURES], or float8.

    Bits become a float32 in place of a conversion, which is slow, or which a device lacks.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    shifts = tl.arange(0, PER_WORD) * BITS
    stored = (words[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)
    stored = tl.reshape(stored, [words.shape[0], PER_WORD * words.shape[1]])
    if FLOAT8:
        bits = ((stored & 128) << 24) | ((stored & 127) << 20)
        return (bits.to(tl.float32, bitcast=True) * _FLOAT8_TO_FLOAT32).to(dtype)
    else:
        numbers = (stored | _INTEGERS).to(tl.float32, bitcast=True)
        return (numbers - zeros[:, None]).to(dtype)


@triton.jit
def _load_zeros(
    zero_points_ptr,
    block,
    num_features,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    BITS: tl.constexpr,
):
    """Load what `_unpacked` subtracts from the features' numbers in one block of columns."""
    PER_WORD: tl.constexpr = 32 // BITS
    if zero_points_ptr is None:
        zeros = tl.full([FEATURES], 2 ** (BITS - 1), tl.float32)
    else:
        feature = tl.arange(0, FEATURES)
        group = tl.minimum(block, GROUPS - 1)
        pointers = zero_points_ptr + group // PER_WORD + feature * triton.cdiv(GROUPS, PER_WORD)
        words = tl.load(pointers, mask=feature < num_features, other=0)
        zeros = ((words >> (group % PER_WORD * BITS)) & (2**BITS - 1)).to(tl.float32)
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
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Return the sums [FEATURES, ROWS] over one split of K, scaled unless there is one group."""
    PER_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = triton.cdiv(K, PER_WORD)
    begin = split * SPLIT_SIZE
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    # Scales are loaded a group ahead: the loop's pipeline has only what is multiplied.
    scales = _load_scales(scales_ptr, begin // BLOCK_K, num_features, GROUPS, FEATURES)
    for start in range(begin, tl.minimum(begin + SPLIT_SIZE, K), BLOCK_K):
        block = start // BLOCK_K
        ahead = _load_scales(scales_ptr, block + 1, num_features, GROUPS, FEATURES)
        zeros = _load_zeros(zero_points_ptr, block, num_features, GROUPS, FEATURES, BITS)
        words = load_tile(
            packed_ptr, num_features, start // PER_WORD, WORDS, FEATURES, BLOCK_K // PER_WORD,
            N % FEATURES == 0,
        )  # fmt: skip
        x = load_tile(x_ptr, num_rows, start, K, ROWS, BLOCK_K)
        w = _unpacked(words, zeros, x.dtype, BITS, FLOAT8)
        if GROUPS == 1:
            total = tl.dot(w, tl.trans(x), total)
        else:
            total = tl.fma(tl.dot(w, tl.trans(x)), scales[:, None], total)
        scales = ahead
    return total


@triton.jit(do_not_specialize=["rows"])
def _packed_matmul_kernel(
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
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one tile, all splits of K or one."""
    wait_for_launch_before(DEPENDENT)
    first_row, first_feature = first_of_tile(rows, N, ROWS, FEATURES)
    x_ptr += first_row.to(tl.int64) * K
    PER_WORD: tl.constexpr = 32 // BITS
    packed_ptr += first_feature.to(tl.int64) * triton.cdiv(K, PER_WORD)
    if scales_ptr is not None:
        scales_ptr += first_feature.to(tl.int64) * GROUPS
    if zero_points_ptr is not None:
        zero_points_ptr += first_feature.to(tl.int64) * triton.cdiv(GROUPS, PER_WORD)
    num_rows, num_features = rows - first_row, N - first_feature
    first_split = tl.program_id(1)
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for split in range(first_split, first_split + SPLITS):
        total += _sum_split(
            x_ptr, packed_ptr, scales_ptr, zero_points_ptr, num_rows, num_features, split,
            N, K, SPLIT_SIZE, ROWS, FEATURES, GROUPS, BLOCK_K, BITS, FLOAT8,
        )  # fmt: skip
    store_tile(
        out_ptr, total, row_scales_ptr, feature_scales_ptr, bias_ptr,
        rows, first_row, first_feature, first_split, N, PARTIAL,
    )  # fmt: skip


def packed_matmul(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    group_size: int,
    zero_points: Tensor | None,
    bias: Tensor | None,
    *,
    bits: int,
    float8: bool = False,
) -> Tensor:
    """Multiply rows by packed weights, and add a bias; see the wrappers that call this.

    Args:
        x: [rows, K] bfloat16 or float16.
        packed: [N, ceil(K * bits / 32)] int32.
        scales: [N, groups], groups = ceil(K / group_size).
        group_size: 32, 64, 128, or -1 for one group.
        zero_points: [N, ceil(groups * bits / 32)] int32, packed like the weights.
        bias: [N].
        bits: 4 or 8.
        float8: True if the numbers are float8_e4m3fn, False if they are integers.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or there are no
            groups of that size.
    """
    check_tensor("x", x, (None, None), (torch.bfloat16, torch.float16), like=x)
    device_of("x", x)
    rows, width = x.shape
    per_word = 32 // bits
    check_tensor("packed", packed, (None, triton.cdiv(width, per_word)), torch.int32, like=x)
    features = len(packed)
    check_product(x, features, bias, x.dtype)
    known = group_size == -1 or group_size in GROUP_SIZES
    check(known, "group_size", f"must be 32, 64, 128 or -1, got {group_size}")
    groups = 1 if group_size == -1 else triton.cdiv(width, group_size)
    check_tensor("scales", scales, (features, groups), MODEL_DTYPES, like=x)
    if zero_points is not None:
        check(not float8, "zero_points", "must be None for float8_e4m3fn")
        shape = features, triton.cdiv(groups, per_word)
        check_tensor("zero_points", zero_points, shape, torch.int32, like=x)
    block = _BLOCK_BITS // bits if groups == 1 else group_size
    return launch_matmul(
        _packed_matmul_kernel,
        x,
        (packed, scales if groups > 1 else None, zero_points),
        features,
        Epilogue(feature_scales=scales if groups == 1 else None, bias=bias),
        packed_matmul_config(rows, block),
        x.dtype,
        GROUPS=groups,
        BLOCK_K=block,
        BITS=bits,
        FLOAT8=float8,
    )
