"""Shared parts of the products: tiles, splits of K, and scaled results.

A product out [rows, N] = x [rows, K] @ w [N, K].T is computed as w @ x.T: the features of `w` fill
the tensor cores even if there is a single row, and weights that are unpacked in registers are the
operand that may stay there.

The result of a row must not depend on how many rows there are, to the last bit. So K is cut into
splits; their number follows from N and K alone. Each split is added up from zero, in the order of
K, and the sums of the splits are added in their order. Few rows: each split is a program of its
own, so that enough of them stream the weights, and a second kernel adds. Many rows: one program
computes all splits of its tile, one after the other, which yields the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning.products import MatmulConfig, matmul_splits

_BAND = tl.constexpr(8)  # tiles of rows that share the weights in the cache
_SUM_TILE = 512  # features that one program of the second kernel adds up
_SUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What turns sums of products into results: sum * row_scale * feature_scale + bias."""

    row_scales: Tensor | None = None  # [rows] float32
    feature_scales: Tensor | None = None  # [N], any float
    bias: Tensor | None = None  # [N], any float


@triton.jit
def first_of_tile(rows, N: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Return the first row and the first feature of this program's tile.

    Programs that run together form a block of a few tiles in both directions, so that they find
    most of what they read in the cache.
    """
    FEATURE_TILES: tl.constexpr = triton.cdiv(N, FEATURES)
    first_of_band = tl.program_id(0) // (_BAND * FEATURE_TILES) * _BAND
    index = tl.program_id(0) % (_BAND * FEATURE_TILES)
    row_tiles = tl.minimum(tl.cdiv(rows, ROWS) - first_of_band, _BAND)
    return (first_of_band + index % row_tiles) * ROWS, index // row_tiles * FEATURES


@triton.jit
def load_tile(
    ptr,
    num_lines,
    start,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALL_LINES: tl.constexpr = False,
    PARTS: tl.constexpr = 1,
):
    """Load columns from `start` on of the lines at `ptr`, as [LINES, COLUMNS].

    Lines are `WIDTH` elements apart. There is zero beyond their width, and beyond `num_lines`
    unless `ALL_LINES` are known to exist. A caller loads blocks of `PARTS` tiles, of which the last
    one may end beyond the width.
    """
    lines = tl.arange(0, LINES)
    columns = tl.arange(0, COLUMNS)
    pointers = ptr + start + (lines * WIDTH)[:, None] + columns[None, :]
    if WIDTH % (PARTS * COLUMNS) != 0:
        mask = (start + columns < WIDTH)[None, :] & (lines < num_lines)[:, None]
        return tl.load(pointers, mask=mask, other=0.0)
    if ALL_LINES:
        return tl.load(pointers)
    return tl.load(pointers, mask=(lines < num_lines)[:, None], other=0.0)


@triton.jit
def load_factors(ptr, start, count, SIZE: tl.constexpr, DEFAULT: tl.constexpr):
    """Load numbers from `start` on in float32 [SIZE]; without a pointer return the default."""
    if ptr is None:
        return tl.full([SIZE], DEFAULT, tl.float32)
    else:
        offsets = tl.arange(0, SIZE)
        return tl.load(ptr + start + offsets, mask=offsets < count, other=0.0).to(tl.float32)


@triton.jit
def finished(sums, row_scales, feature_scales, bias):
    """Return the results in float32. An explicit fma rounds alike in every kernel."""
    return tl.fma(sums.to(tl.float32) * row_scales, feature_scales, bias)


@triton.jit
def store_tile(
    out_ptr,
    total,
    row_scales_ptr,
    feature_scales_ptr,
    bias_ptr,
    rows,
    first_row,
    first_feature,
    split,
    N: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Store a tile of sums [FEATURES, ROWS]: as they are in [splits, rows, N], or finished."""
    FEATURES: tl.constexpr = total.shape[0]
    ROWS: tl.constexpr = total.shape[1]
    row = tl.arange(0, ROWS)
    feature = tl.arange(0, FEATURES)
    if PARTIAL:
        out_ptr += split.to(tl.int64) * rows * N
    else:
        num_rows, num_features = rows - first_row, N - first_feature
        row_scales = load_factors(row_scales_ptr, first_row, num_rows, ROWS, 1.0)
        scales = load_factors(feature_scales_ptr, first_feature, num_features, FEATURES, 1.0)
        bias = load_factors(bias_ptr, first_feature, num_features, FEATURES, 0.0)
        total = finished(total, row_scales[None, :], scales[:, None], bias[:, None])
    out_ptr += first_row.to(tl.int64) * N + first_feature
    pointers = out_ptr + (row * N)[:, None] + feature[None, :]
    mask = (row < rows - first_row)[:, None] & (feature < N - first_feature)[None, :]
    tl.store(pointers, tl.trans(total).to(out_ptr.dtype.element_ty), mask=mask)


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
def matmul_kernel(
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
    DEPENDENT: tl.constexpr,
):
    """One program: one tile, all splits of K or one. Products of int8 are added in int32."""
    wait_for_launch_before(DEPENDENT)
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


@triton.jit(do_not_specialize=["rows"])
def _add_splits_kernel(
    partial_ptr,
    out_ptr,
    row_scales_ptr,
    feature_scales_ptr,
    bias_ptr,
    rows,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: a part of one row."""
    wait_for_launch_before(DEPENDENT)
    TILES: tl.constexpr = triton.cdiv(N, TILE)
    row = (tl.program_id(0) // TILES).to(tl.int64)
    first = tl.program_id(0) % TILES * TILE
    features = first + tl.arange(0, TILE)
    inside = features < N
    total = tl.zeros([TILE], partial_ptr.dtype.element_ty)
    for split in tl.static_range(SPLITS):
        line_ptr = partial_ptr + (split * rows.to(tl.int64) + row) * N
        total += tl.load(line_ptr + features, mask=inside, other=0.0)
    row_scale = 1.0 if row_scales_ptr is None else tl.load(row_scales_ptr + row)
    scales = load_factors(feature_scales_ptr, first, N - first, TILE, 1.0)
    bias = load_factors(bias_ptr, first, N - first, TILE, 0.0)
    values = finished(total, row_scale, scales, bias)
    tl.store(out_ptr + row * N + features, values.to(out_ptr.dtype.element_ty), mask=inside)


def check_product(
    x: Tensor, num_features: int, bias: Tensor | None, out_dtype: torch.dtype
) -> None:
    """Check what all products have in common, for an `x` that is a tensor of two dimensions.

    Raises:
        ArgumentError: K or N is 0, the bias does not fit, or no result has the dtype.
    """
    check(x.shape[1] > 0 and num_features > 0, "x", "must have at least one column")
    check(out_dtype in MODEL_DTYPES, "out_dtype", f"must be a float type, got {out_dtype}")
    if bias is not None:
        check_tensor("bias", bias, (num_features,), MODEL_DTYPES, like=x)


def launch_matmul(
    kernel: Any,
    x: Tensor,
    operands: tuple[Tensor | None, ...],
    num_features: int,
    epilogue: Epilogue,
    config: MatmulConfig,
    out_dtype: torch.dtype,
    sum_dtype: torch.dtype = torch.float32,
    **constants: object,
) -> Tensor:
    """Launch a product for checked arguments and the sum of its splits; return [rows, N].

    Args:
        kernel: called with `x`, the operands, an output, the epilogue's tensors and the number of
            rows; its constants are N, K, SPLIT_SIZE, SPLITS (splits that one program computes),
            PARTIAL, ROWS, FEATURES, DEPENDENT and `constants`.
        x: [rows, K].
        operands: the weights and what belongs to them.
        num_features: N.
        epilogue: applied to the sums.
        config: tile sizes and launch options.
        out_dtype: dtype of the result.
        sum_dtype: dtype of the sums.
        constants: more constants of the kernel.
    """
    rows, width = x.shape
    out = torch.empty((rows, num_features), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    splits, split_size = matmul_splits(num_features, width)
    partial = splits > 1 and config.split
    target, rest = out, epilogue
    if partial:
        target = torch.empty((splits, *out.shape), dtype=sum_dtype, device=x.device)
        rest = Epilogue()
    dependent = dependent_launch(device_of("x", x))
    tiles = triton.cdiv(rows, config.rows) * triton.cdiv(num_features, config.features)
    kernel[(tiles, splits if partial else 1)](
        x,
        *operands,
        target,
        rest.row_scales,
        rest.feature_scales,
        rest.bias,
        rows,
        N=num_features,
        K=width,
        SPLIT_SIZE=split_size,
        SPLITS=1 if partial else splits,
        PARTIAL=partial,
        ROWS=config.rows,
        FEATURES=config.features,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent,
        **constants,
    )
    if partial:
        _add_splits_kernel[(rows * triton.cdiv(num_features, _SUM_TILE),)](
            target,
            out,
            epilogue.row_scales,
            epilogue.feature_scales,
            epilogue.bias,
            rows,
            N=num_features,
            SPLITS=splits,
            TILE=_SUM_TILE,
            num_warps=_SUM_WARPS,
            **dependent,
        )
    return out
