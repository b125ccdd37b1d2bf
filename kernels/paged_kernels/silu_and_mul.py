"""The gated activations of a feed-forward layer.

SwiGLU and GEGLU without their matrix products: Shazeer, "GLU Variants Improve Transformer" (2020),
equations 5 and 6. GELU by a hyperbolic tangent: Hendrycks and Gimpel, "Gaussian Error Linear Units"
(2016), section 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._activation import geglu, swiglu
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor

_MAX_TILE = 1024  # small enough that one row keeps many multiprocessors busy


@triton.jit
def _gated_activation_kernel(
    gate_up_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    GELU: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one tile of one row."""
    wait_for_launch_before(DEPENDENT)
    TILES: tl.constexpr = triton.cdiv(WIDTH, TILE)
    row = (tl.program_id(0) // TILES).to(tl.int64)
    columns = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    inside = columns < WIDTH
    gate_ptrs = gate_up_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        product = geglu(gate, up)
    else:
        product = swiglu(gate, up, 1.0, None, 0.0)
    product = product.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, product, mask=inside)


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up, silu(x) = x / (1 + e**-x), for each row in float32, rounded once.

    Args:
        gate_up: [rows, 2 * width] bfloat16, float16 or float32: each row is gate, then up.
        out: [rows, width], dtype of `gate_up`, for the result.

    Returns:
        `out`, or a new tensor.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    return _gated_activation(gate_up, out, gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute gelu(gate) * up; gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).

    Arguments, result and errors are as in `silu_and_mul`.
    """
    return _gated_activation(gate_up, out, gelu=True)


def _gated_activation(gate_up: Tensor, out: Tensor | None, *, gelu: bool) -> Tensor:
    check_tensor("gate_up", gate_up, (None, None), MODEL_DTYPES, like=gate_up)
    device = device_of("gate_up", gate_up)
    rows, both = gate_up.shape
    check(both % 2 == 0, "gate_up", f"must have rows of two equal halves, got {both} elements")
    width = both // 2
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    check_tensor("out", out, (rows, width), gate_up.dtype, like=gate_up)
    tile = min(triton.next_power_of_2(width), _MAX_TILE)
    _gated_activation_kernel[(rows * triton.cdiv(width, tile),)](
        gate_up,
        out,
        WIDTH=width,
        TILE=tile,
        GELU=gelu,
        num_warps=max(tile // 256, 1),
        **dependent_launch(device),
    )
    return out
