"""Products of 16-bit numbers for few rows: nearly all of their time goes to reading the weights.

K is split among programs if there are too few features to keep every multiprocessor busy, and the
last of a tile's programs to finish adds the sums of all of them ("split-K"; the fix-up of Stream-K,
Osama et al., 2023, in a fixed order). So there is no second launch. The gated activation of a
feed-forward layer is applied to the sums, which saves another one. The norm of the input was tried
as a part of the products, too; on an H200 its own launch is faster. Nothing was gained there by
bringing weights into the L2 cache while the launch before runs: a product of weights that are in
that cache still takes two thirds of the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._activation import swiglu
from paged_kernels._matmul import check_product, load_factors
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import Device, device_of
from paged_kernels.errors import check, check_tensor
from paged_kernels.splits import is_last
from paged_kernels.tuning.products import dense_matmul_config, gated_matmul_config, matmul_splits

MAX_ROWS = 64
"""The most rows of a product. With more of them, arithmetic begins to take as long as reading."""

_DTYPES = (torch.bfloat16, torch.float16)
_BLOCK_K = 64  # columns per loop iteration


def dense_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, arrivals: Tensor | None = None
) -> Tensor:
    """Compute x @ w.T + bias in float32, rounded once.

    A row's result does not depend on the number of rows, to the last bit: sums are added in an
    order that follows from N and K alone.

    Args:
        x: [rows, K] bfloat16 or float16, at most `MAX_ROWS` rows.
        w: [N, K], dtype of `x`.
        bias: [N] bfloat16, float16 or float32.
        arrivals: [:func:`num_arrivals`] int32 zeros, or more; zeros again afterwards. Calls that
            share them must run one after the other. Made if None, by a launch.

    Returns:
        [rows, N], dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    device = _check_operands(x, "w", w)
    rows, (features, width) = len(x), w.shape
    check_product(x, features, bias, x.dtype)
    out = x.new_empty(rows, features)
    if not rows:
        return out
    config = dense_matmul_config(rows)
    tiles = triton.cdiv(features, config.features)
    splits, split_size = matmul_splits(features, width)
    partial = None
    if splits > 1:
        partial = torch.empty((splits, rows, features), dtype=torch.float32, device=x.device)
        if arrivals is None:
            arrivals = torch.zeros(tiles, dtype=torch.int32, device=x.device)
        check_tensor("arrivals", arrivals, (None,), torch.int32, like=x)
        check(len(arrivals) >= tiles, "arrivals", f"must be at least {tiles}")
    _dense_kernel[(tiles * splits,)](
        x,
        w,
        bias,
        out,
        partial,
        arrivals,
        rows,
        N=features,
        K=width,
        SPLITS=splits,
        SPLIT_SIZE=split_size,
        ROWS=config.rows,
        FEATURES=config.features,
        BLOCK_K=_BLOCK_K,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(device),
    )
    return out


def num_arrivals(features: int) -> int:
    """Return the length of `arrivals` that products with this number of features need."""
    return -(-features // dense_matmul_config(1).features)


def dense_matmul_silu_and_mul(x: Tensor, gate_up: Tensor) -> Tensor:
    """Compute silu(x @ gate.T) * (x @ up.T), silu(x) = x / (1 + e**-x), in float32, rounded once.

    K is not split, as the weights of feed-forward layers have enough features. So a row's result
    does not depend on the number of rows, to the last bit.

    Args:
        x: [rows, K] bfloat16 or float16, at most `MAX_ROWS` rows.
        gate_up: [2 * N, K], dtype of `x`: the rows of gate, then the rows of up.

    Returns:
        [rows, N], dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    device = _check_operands(x, "gate_up", gate_up)
    check_product(x, len(gate_up), None, x.dtype)
    halves = len(gate_up) % 2 == 0
    check(halves, "gate_up", f"must have rows of two equal halves, got {len(gate_up)}")
    rows, width = x.shape
    features = len(gate_up) // 2
    out = x.new_empty(rows, features)
    if rows:
        config = gated_matmul_config(rows)
        _gated_kernel[(triton.cdiv(2 * features, config.features),)](
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
            **dependent_launch(device),
        )
    return out


def _check_operands(x: Tensor, name: str, w: Tensor) -> Device:
    check_tensor("x", x, (None, None), _DTYPES, like=x)
    check_tensor(name, w, (None, x.shape[1]), x.dtype, like=x)
    check(len(x) <= MAX_ROWS, "x", f"must have at most {MAX_ROWS} rows, got {len(x)}")
    return device_of("x", x)


@triton.jit(do_not_specialize=["rows"])
def _dense_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one split of K of one tile; the last of a tile's programs adds their sums."""
    wait_for_launch_before(DEPENDENT)
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    begin = split * SPLIT_SIZE
    row = tl.arange(0, ROWS)
    feature = tile * FEATURES + tl.arange(0, FEATURES)
    inside = feature < N
    total = _sum_products(
        x_ptr + begin, w_ptr + feature.to(tl.int64) * K + begin, rows, inside, K - begin,
        K, SPLIT_SIZE, ROWS, FEATURES, BLOCK_K, N % FEATURES == 0,
    )  # fmt: skip
    sums = tl.trans(total)
    at = row[:, None] * N + feature[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    if SPLITS > 1:
        size = rows * N  # elements of the sums of a split
        tl.store(partial_ptr + split * size + at, sums, mask=mask)
        if not is_last(arrivals_ptr + tile, SPLITS):
            return
        sums = tl.zeros([ROWS, FEATURES], tl.float32)
        # Other programs wrote these, so they are read from the cache that all programs share.
        for part in tl.static_range(SPLITS):
            sums += tl.load(partial_ptr + part * size + at, mask=mask, cache_modifier=".cg")
    sums += load_factors(bias_ptr, tile * FEATURES, N - tile * FEATURES, FEATURES, 0.0)[None, :]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=mask)


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
    DEPENDENT: tl.constexpr,
):
    """One program: one tile of the activation. Its lines of gate and of up take turns."""
    wait_for_launch_before(DEPENDENT)
    row = tl.arange(0, ROWS)
    line = tl.arange(0, 2 * FEATURES)
    feature = tl.program_id(0) * FEATURES + line // 2
    total = _sum_products(
        x_ptr, w_ptr + (feature + line % 2 * N).to(tl.int64) * K, rows, feature < N, K,
        K, K, ROWS, 2 * FEATURES, BLOCK_K, N % FEATURES == 0,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(total, [FEATURES, 2, ROWS]), [2, 0, 1]))
    values = swiglu(gate, up, 1.0, None, 0.0).to(out_ptr.dtype.element_ty)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    mask = (row < rows)[:, None] & (feature < N)[None, :]
    tl.store(out_ptr + row[:, None] * N + feature[None, :], values, mask=mask)


@triton.jit
def _sum_products(
    x_ptr,
    line_ptrs,
    rows,
    inside,
    num_columns,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL_LINES: tl.constexpr,
):
    """Multiply SIZE columns, fewer if only `num_columns` are left, of lines of weights and rows.

    Lines begin at `line_ptrs` and exist where `inside`, which is known to be true for ALL_LINES.
    Returns the sums [LINES, ROWS].
    """
    WHOLE: tl.constexpr = K % SIZE == 0 and SIZE % BLOCK_K == 0
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * K + column[None, :]
    w_ptrs = line_ptrs[:, None] + column[None, :]
    total = tl.zeros([LINES, ROWS], tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        some = (row < rows)[:, None]
        if WHOLE:
            if ALL_LINES:
                w = tl.load(w_ptrs + start)
            else:
                w = tl.load(w_ptrs + start, mask=inside[:, None], other=0.0)
        else:
            exists = (start + column < tl.minimum(num_columns, SIZE))[None, :]
            some = some & exists
            w = tl.load(w_ptrs + start, mask=inside[:, None] & exists, other=0.0)
        x = tl.load(x_ptrs + start, mask=some, other=0.0)
        total = tl.dot(w, tl.trans(x), total)
    return total
