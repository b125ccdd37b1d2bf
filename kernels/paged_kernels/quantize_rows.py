"""Symmetric quantization of activations: one scale for each row, or for each group of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._quantization import divided, scales_of, storable
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES, QUANTIZED_DTYPES, check_float8
from paged_kernels.errors import check, check_tensor

_MAX_TILE = 16384  # elements that a program keeps in registers: 32 per thread
_GROUP_TILE = 2048  # elements of a program if a row has several groups


@triton.jit
def _load(x_ptr, groups, columns, num_groups, K: tl.constexpr, GROUP: tl.constexpr):
    """Load these columns of each group in float32; also return their offsets and the mask."""
    GROUPS: tl.constexpr = triton.cdiv(K, GROUP)
    first = (groups % GROUPS * GROUP)[:, None]
    offsets = (groups // GROUPS * K)[:, None] + first + columns[None, :]
    inside = (groups < num_groups)[:, None] & (columns < GROUP)[None, :]
    if K % GROUP != 0:
        inside &= first + columns[None, :] < K
    return tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32), offsets, inside


@triton.jit
def _store(values_ptr, x, scales, offsets, inside):
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    values = storable(divided(x, scales[:, None]), dtype)
    tl.store(values_ptr + offsets, values.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_groups"])
def _quantize_rows_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    num_groups,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: some groups of consecutive elements. One wider than a tile is read twice."""
    wait_for_launch_before(DEPENDENT)
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    groups = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, TILE)
    if GROUP <= TILE:
        x, offsets, inside = _load(x_ptr, groups, columns, num_groups, K, GROUP)
        scales = scales_of(tl.max(tl.abs(x), 1), dtype)
        _store(values_ptr, x, scales, offsets, inside)
    else:
        largest = tl.zeros([LINES, TILE], tl.float32)
        for start in range(0, GROUP, TILE):
            x, _, _ = _load(x_ptr, groups, start + columns, num_groups, K, GROUP)
            largest = tl.maximum(largest, tl.abs(x))
        scales = scales_of(tl.max(largest, 1), dtype)
        for start in range(0, GROUP, TILE):
            x, offsets, inside = _load(x_ptr, groups, start + columns, num_groups, K, GROUP)
            _store(values_ptr, x, scales, offsets, inside)
    tl.store(scales_ptr + groups, scales, mask=groups < num_groups)


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, *, group_size: int = -1
) -> tuple[Tensor, Tensor]:
    """Quantize each row, or each group of consecutive elements of a row, with a separate scale.

    The scale is the largest absolute value divided by 127 (int8) or 448 (float8_e4m3fn), or 1 if
    that is 0, as for a row of zeros. Both quotients are rounded to float32; then x / scale is
    rounded to the nearest stored value, ties to even. So the result of a row depends on that row
    alone and is the same on every device. The numbers must be finite.

    Args:
        x: [rows, K] bfloat16, float16 or float32, contiguous.
        dtype: int8 or float8_e4m3fn.
        group_size: number of elements that share a scale; -1 for the whole row. The last group
            of a row may be smaller.

    Returns:
        The values [rows, K] in `dtype`, and the scales in float32: [rows], or with a group size
        [rows, ceil(K / group_size)]. A value times its scale approximates the element of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or the device has
            no float8_e4m3fn (compute capability below 8.9).
    """
    check_tensor("x", x, (None, None), MODEL_DTYPES, like=x)
    check(dtype in QUANTIZED_DTYPES, "dtype", f"must be float8_e4m3fn or int8, got {dtype}")
    device = device_of("x", x)
    check_float8("dtype", dtype, device.arch)
    check(group_size == -1 or group_size > 0, "group_size", f"must be positive, got {group_size}")
    rows, width = x.shape
    check(width > 0, "x", "must have at least one column")
    group = width if group_size == -1 else min(group_size, width)
    groups = triton.cdiv(width, group)
    values = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    tile = min(triton.next_power_of_2(group), _MAX_TILE)
    lines = max(_GROUP_TILE // tile, 1) if groups > 1 else 1
    if rows:
        _quantize_rows_kernel[(triton.cdiv(rows * groups, lines),)](
            x,
            values,
            scales,
            rows * groups,
            K=width,
            GROUP=group,
            LINES=lines,
            TILE=tile,
            num_warps=min(max(lines * tile // 512, 1), 16),
            **dependent_launch(device),
        )
    return values, scales[:, 0] if group_size == -1 else scales
