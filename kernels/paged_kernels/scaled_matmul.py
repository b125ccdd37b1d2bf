"""Products of int8 or FP8 numbers with a scale for each row and one for each output feature."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels._matmul import Epilogue, check_product, launch_matmul, matmul_kernel
from paged_kernels.device import device_of
from paged_kernels.dtypes import QUANTIZED_DTYPES, check_float8
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning.products import scaled_matmul_config

_MAX_INT8_WIDTH = 2**31 // 2**14 - 1  # most columns for which no sum overflows an int32
_BLOCK_K = 128


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
        matmul_kernel,
        x,
        (w,),
        features,
        Epilogue(x_scales, w_scales, bias),
        scaled_matmul_config(rows),
        out_dtype,
        torch.int32 if x.dtype == torch.int8 else torch.float32,
        BLOCK_K=_BLOCK_K,
    )
