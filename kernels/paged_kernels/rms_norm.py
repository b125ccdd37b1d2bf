"""Root mean square norm of rows, optionally after adding a residual stream.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check_tensor

_MAX_TILE = 16384  # elements that a program keeps in registers: 32 per thread


@triton.jit
def _load_sum(x_ptr, residual_ptr, columns, WIDTH: tl.constexpr):
    """Load part of a row in float32; if there is a residual, add to it in place first."""
    inside = columns < WIDTH
    values = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        values += tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    return values


@triton.jit
def _store_scaled(out_ptr, values, scale, weight_ptr, columns, WIDTH: tl.constexpr):
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = (values * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + columns, scaled, mask=inside)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one row. A row wider than a tile is read again, from the cache."""
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * X_STRIDE
    out_ptr += row * OUT_STRIDE
    if residual_ptr is not None:
        residual_ptr += row * RESIDUAL_STRIDE
    columns = tl.arange(0, TILE)
    if WIDTH <= TILE:
        values = _load_sum(x_ptr, residual_ptr, columns, WIDTH)
        scale = tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
        _store_scaled(out_ptr, values, scale, weight_ptr, columns, WIDTH)
    else:
        squares = tl.zeros([TILE], tl.float32)
        for start in range(0, WIDTH, TILE):
            values = _load_sum(x_ptr, residual_ptr, start + columns, WIDTH)
            squares += values * values
        scale = tl.rsqrt(tl.sum(squares) / WIDTH + eps)
        for start in range(0, WIDTH, TILE):
            # The residual holds the sums by now: all threads stored them before `tl.sum` ended.
            summed_ptr = x_ptr if residual_ptr is None else residual_ptr
            values = _load_sum(summed_ptr, None, start + columns, WIDTH)
            _store_scaled(out_ptr, values, scale, weight_ptr, start + columns, WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute x / sqrt(mean(x**2) + eps) * weight for each row, in float32, rounded once.

    Args:
        x: [rows, width] bfloat16, float16 or float32, of any width. Rows may be strided by
            multiples of 16 bytes.
        weight: [width], dtype of `x` or float32.
        eps: added to the mean of the squares.
        out: [rows, width] for the result, may be strided like `x`; may be `x` itself.

    Returns:
        `out`, or a new tensor.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    return _norm(x, None, weight, eps, out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add `x` to `residual` in place, then write the norm of the rounded sum to `out`.

    Args:
        x: as for `rms_norm`.
        residual: [rows, width], dtype of `x`, may be strided like `x`; updated.
        weight: as for `rms_norm`.
        eps: as for `rms_norm`.
        out: as for `rms_norm`; may be `x`, not `residual`.

    Returns:
        `out`, or a new tensor.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    _check_rows("x", x, x)
    _check_rows("residual", residual, x)
    return _norm(x, residual, weight, eps, out)


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None
) -> Tensor:
    _check_rows("x", x, x)
    device = device_of("x", x)
    rows, width = x.shape
    check_tensor("weight", weight, (width,), (x.dtype, torch.float32), like=x)
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _check_rows("out", out, x)
    tile = min(triton.next_power_of_2(width), _MAX_TILE)
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        eps,
        X_STRIDE=x.stride(0),
        RESIDUAL_STRIDE=0 if residual is None else residual.stride(0),
        OUT_STRIDE=out.stride(0),
        WIDTH=width,
        TILE=tile,
        num_warps=min(max(tile // 512, 1), 16),
        **dependent_launch(device),
    )
    return out


def _check_rows(name: str, tensor: Tensor, x: Tensor) -> None:
    """Check that a tensor matches `x`. Only contiguous tensors may have any width."""
    shape, dtypes = ((None, None), MODEL_DTYPES) if tensor is x else (tuple(x.shape), (x.dtype,))
    check_tensor(name, tensor, shape, dtypes, like=x, contiguous=tensor.is_contiguous())
