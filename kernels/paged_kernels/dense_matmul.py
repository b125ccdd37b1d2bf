"""Products of 16-bit numbers for few rows: nearly all of their time goes to reading the weights.

K is split among programs if there are too few features to keep every multiprocessor busy. The
gated activation of a feed-forward layer is applied to the sums, which saves a launch and a round
trip through memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._activation import swiglu
from paged_kernels._matmul import (
    Epilogue,
    check_product,
    first_of_tile,
    launch_matmul,
    load_tile,
    matmul_kernel,
)
from paged_kernels.device import device_of
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning import dense_matmul_config

_DTYPES = (torch.bfloat16, torch.float16)
_BLOCK_K = 64


def dense_matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ w.T + bias in float32, rounded once.

    A row's result does not depend on the number of rows, to the last bit: sums are added in an
    order that follows from N and K alone.

    Args:
        x: [rows, K] bfloat16 or float16.
        w: [N, K], dtype of `x`.
        bias: [N] bfloat16, float16 or float32.

    Returns:
        [rows, N], dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    _check_operands(x, "w", w)
    check_product(x, len(w), bias, x.dtype)
    return launch_matmul(
        matmul_kernel,
        x,
        (w,),
        len(w),
        Epilogue(bias=bias),
        dense_matmul_config(len(x)),
        x.dtype,
        BLOCK_K=_BLOCK_K,
    )


def dense_matmul_silu_and_mul(x: Tensor, gate_up: Tensor) -> Tensor:
    """Compute silu(x @ gate.T) * (x @ up.T), silu(x) = x / (1 + e**-x), in float32, rounded once.

    K is not split, as the weights of feed-forward layers have enough features. So a row's result
    does not depend on the number of rows, to the last bit.

    Args:
        x: [rows, K] bfloat16 or float16.
        gate_up: [2 * N, K], dtype of `x`: the rows of gate, then the rows of up.

    Returns:
        [rows, N], dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    _check_operands(x, "gate_up", gate_up)
    check_product(x, len(gate_up), None, x.dtype)
    halves = len(gate_up) % 2 == 0
    check(halves, "gate_up", f"must have rows of two equal halves, got {len(gate_up)}")
    rows, width = x.shape
    features = len(gate_up) // 2
    out = x.new_empty(rows, features)
    if rows:
        config = dense_matmul_config(rows)
        tiles = triton.cdiv(rows, config.rows) * triton.cdiv(2 * features, config.features)
        _gated_kernel[(tiles,)](
            x,
            gate_up,
            out,
            rows,
            N=features,
            K=width,
            ROWS=config.rows,
            FEATURES=config.features // 2,
            BLOCK_K=_BLOCK_K,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def _check_operands(x: Tensor, name: str, w: Tensor) -> None:
    check_tensor("x", x, (None, None), _DTYPES, like=x)
    device_of("x", x)
    check_tensor(name, w, (None, x.shape[1]), x.dtype, like=x)


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one tile of the activation. Its lines of gate and of up take turns."""
    first_row, first_feature = first_of_tile(rows, N, ROWS, FEATURES)
    x_ptr += first_row.to(tl.int64) * K
    num_rows = rows - first_row
    line = tl.arange(0, 2 * FEATURES)
    feature = first_feature + line // 2
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (feature + line % 2 * N).to(tl.int64)[:, None] * K + columns[None, :]
    total = tl.zeros([2 * FEATURES, ROWS], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask = (feature < N)[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (start + columns < K)[None, :]
        w = tl.load(w_ptrs + start, mask=mask, other=0.0)
        x = load_tile(x_ptr, num_rows, start, K, ROWS, BLOCK_K)
        total = tl.dot(w, tl.trans(x), total)
    gate, up = tl.split(tl.permute(tl.reshape(total, [FEATURES, 2, ROWS]), [2, 0, 1]))
    values = swiglu(gate, up, 1.0, None, 0.0).to(out_ptr.dtype.element_ty)
    row = tl.arange(0, ROWS)
    features = first_feature + tl.arange(0, FEATURES)
    pointers = out_ptr + (first_row + row).to(tl.int64)[:, None] * N + features[None, :]
    tl.store(pointers, values, mask=(row < num_rows)[:, None] & (features < N)[None, :])
