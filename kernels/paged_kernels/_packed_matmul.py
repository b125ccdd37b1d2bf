"""Products of 16-bit activations with weights of 4 or 8 bits that are unpacked in registers.

`packed_words` has the order of the numbers in 32-bit words: each word has two numbers that are
neighbors in a row, 16 bits apart, so that both are unpacked at once and are where the tensor cores
expect them. The rounding of weights to a grid with a scale for each group: Frantar et al., "GPTQ"
(2022), section 4.
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
from paged_kernels.packed_words import PART, num_words
from paged_kernels.tuning.products import packed_matmul_config

GROUP_SIZES = (32, 64, 128)
_FLOAT32_INTEGERS = tl.constexpr(0x4B000000)  # the bits of the float32 2**23


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """Return the low and the high half of each word [FEATURES, WORDS], [FEATURES, PART]."""
    halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    return tl.reshape(halves, [words.shape[0], 2 * words.shape[1]]).to(dtype, bitcast=True)


@triton.jit
def _numbers(
    words, zeros, part: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr, FLOAT8: tl.constexpr
):
    """Unpack a part of a block [FEATURES, PART]: differences to zeros [FEATURES], or float8.

    All numbers are exact. The bits of an integer go to the lowest bits of a float that has no bits
    for a fraction, of two numbers at a time where the dtype has room for them.
    """
    stored = words >> (BITS * part)
    if FLOAT8:  # their sum with the difference of the exponents' biases is the exponent
        shift: tl.constexpr = 4 if dtype == tl.bfloat16 else 7
        scale: tl.constexpr = 2.0**120 if dtype == tl.bfloat16 else 2.0**8
        stored = ((stored & 0x00800080) << 8) | ((stored & 0x007F007F) << shift)
        return _halves(stored, dtype) * tl.full([1, 1], scale, tl.float32).to(dtype)
    elif BITS == 8 and dtype == tl.bfloat16:  # which has too few bits for it
        both = tl.join(stored & 255, (stored >> 16) & 255) | _FLOAT32_INTEGERS
        both = tl.reshape(both, [words.shape[0], 2 * words.shape[1]]).to(tl.float32, bitcast=True)
        return (both - zeros[:, None]).to(dtype)
    else:
        lowest: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
        integers: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        return _halves((stored & lowest) | integers, dtype) - zeros[:, None].to(dtype)


@triton.jit
def _load_factors(
    scales_ptr,
    zero_points_ptr,
    group,
    num_features,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    FIRST_INTEGER: tl.constexpr,
    BITS: tl.constexpr,
):
    """Load the features' scales [FEATURES] in a group, and what `_numbers` subtracts from theirs.

    Beyond the last group they are those of the last one.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    feature = tl.arange(0, FEATURES)
    exists = feature < num_features
    group = tl.minimum(group, GROUPS - 1)
    scales = tl.full([FEATURES], 1.0, tl.float32)
    if scales_ptr is not None:
        pointers = scales_ptr + group + feature * GROUPS
        scales = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    zeros = tl.full([FEATURES], 2 ** (BITS - 1), tl.float32)
    if zero_points_ptr is not None:
        pointers = zero_points_ptr + group // PER_WORD + feature * triton.cdiv(GROUPS, PER_WORD)
        words = tl.load(pointers, mask=exists, other=0)
        zeros = ((words >> (group % PER_WORD * BITS)) & (2**BITS - 1)).to(tl.float32)
    return scales, zeros + FIRST_INTEGER


@triton.jit
def _factors_of_block(
    scales_ptr,
    zero_points_ptr,
    start,
    num_features,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FEATURES: tl.constexpr,
    FIRST_INTEGER: tl.constexpr,
    BITS: tl.constexpr,
):
    """Load the scales and zeros of the parts from column `start` on, of four at most."""
    return (
        _load_factors(
            scales_ptr, zero_points_ptr, start // GROUP, num_features,
            GROUPS, FEATURES, FIRST_INTEGER, BITS,
        ),
        _load_factors(
            scales_ptr, zero_points_ptr, (start + PART) // GROUP, num_features,
            GROUPS, FEATURES, FIRST_INTEGER, BITS,
        ),
        _load_factors(
            scales_ptr, zero_points_ptr, (start + 2 * PART) // GROUP, num_features,
            GROUPS, FEATURES, FIRST_INTEGER, BITS,
        ),
        _load_factors(
            scales_ptr, zero_points_ptr, (start + 3 * PART) // GROUP, num_features,
            GROUPS, FEATURES, FIRST_INTEGER, BITS,
        ),
    )  # fmt: skip


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
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST_INTEGER: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
):
    """Return the sums [FEATURES, ROWS] over one split of K, scaled unless there is one group."""
    PARTS: tl.constexpr = 16 // BITS
    BLOCK: tl.constexpr = PART * PARTS
    WORDS: tl.constexpr = PART // 2  # words of a block
    begin = split * SPLIT_SIZE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    # Factors are loaded a block ahead: the loop's pipeline has only what is multiplied.
    factors = _factors_of_block(
        scales_ptr, zero_points_ptr, begin, num_features,
        PART, GROUP, GROUPS, FEATURES, FIRST_INTEGER, BITS,
    )  # fmt: skip
    for start in range(begin, tl.minimum(begin + SPLIT_SIZE, K), BLOCK):
        ahead = _factors_of_block(
            scales_ptr, zero_points_ptr, start + BLOCK, num_features,
            PART, GROUP, GROUPS, FEATURES, FIRST_INTEGER, BITS,
        )  # fmt: skip
        words = load_tile(
            packed_ptr, num_features, start // BLOCK * WORDS, WORDS * triton.cdiv(K, BLOCK),
            FEATURES, WORDS, N % FEATURES == 0,
        )  # fmt: skip
        group_sum = tl.zeros([FEATURES, ROWS], tl.float32)
        for part in tl.static_range(PARTS):
            scales, zeros = factors[part]
            x = load_tile(x_ptr, num_rows, start + part * PART, K, ROWS, PART, False, PARTS)
            w = _numbers(words, zeros, part, dtype, BITS, FLOAT8)
            if GROUPS == 1:
                total = tl.dot(w, tl.trans(x), total)
            else:
                group_sum = tl.dot(w, tl.trans(x), group_sum)
                if (part + 1) * PART % GROUP == 0 or part + 1 == PARTS:
                    total = tl.fma(group_sum, scales[:, None], total)
                    group_sum = tl.zeros([FEATURES, ROWS], tl.float32)
        factors = ahead
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
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST_INTEGER: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT8: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one tile, all splits of K or one."""
    wait_for_launch_before(DEPENDENT)
    first_row, first_feature = first_of_tile(rows, N, ROWS, FEATURES)
    x_ptr += first_row.to(tl.int64) * K
    PER_WORD: tl.constexpr = 32 // BITS
    BLOCK: tl.constexpr = PART * 16 // BITS
    packed_ptr += first_feature.to(tl.int64) * (triton.cdiv(K, BLOCK) * (PART // 2))
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
            N, K, SPLIT_SIZE, ROWS, FEATURES, PART, GROUP, GROUPS, FIRST_INTEGER, BITS,
            FLOAT8,
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
        packed: [N, :func:`num_words`] int32, as `packed_words.pack_words` returns.
        scales: [N, groups], groups = ceil(K / group_size).
        group_size: 32, 64, 128, or -1 for one group.
        zero_points: [N, ceil(groups * bits / 32)] int32, the first one in the lowest bits.
        bias: [N].
        bits: 4 or 8.
        float8: True if the numbers are float8_e4m3fn, False if they are integers.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or there are no
            groups of that size.
    """
    check_tensor("x", x, (None, None), (torch.bfloat16, torch.float16), like=x)
    device = device_of("x", x)
    rows, width = x.shape
    per_word = 32 // bits
    check_tensor("packed", packed, (None, num_words(width, bits)), torch.int32, like=x)
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
    return launch_matmul(
        _packed_matmul_kernel,
        x,
        (packed, scales if groups > 1 else None, zero_points),
        features,
        Epilogue(feature_scales=scales if groups == 1 else None, bias=bias),
        packed_matmul_config(device.arch, rows, grouped=groups > 1),
        x.dtype,
        PART=PART,
        GROUP=max(width, 1) if groups == 1 else group_size,
        GROUPS=groups,
        FIRST_INTEGER=_first_integer(x.dtype, bits),
        BITS=bits,
        FLOAT8=float8,
    )


def _first_integer(dtype: torch.dtype, bits: int) -> float:
    """Return the float with the bits that `_numbers` sets, and 0 in those of an integer."""
    if dtype == torch.float16:
        return 2.0**10
    return 2.0**7 if bits == 4 else 2.0**23
