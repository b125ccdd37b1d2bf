"""The gated activation of a feed-forward layer.

SwiGLU without its matrix products: Shazeer, "GLU Variants Improve Transformer" (2020), equation 5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor

_MAX_TILE = 1024  # small enough that one row keeps many multiprocessors busy


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """One program: one tile of one row."""
    TILES: tl.constexpr = tl.cdiv(WIDTH, TILE)
    row = (tl.program_id(0) // TILES).to(tl.int64)
    columns = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    inside = columns < WIDTH
    gate_ptrs = gate_up_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=inside, other=0.0).to(tl.float32)
    # e**-|x| is at most 1, so it cannot overflow.
    decay = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0.0, 1.0, decay) / (1.0 + decay)
    product = (gate * sigmoid * up).to(out_ptr.dtype.element_ty)
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
    check_tensor("gate_up", gate_up, (None, None), MODEL_DTYPES, like=gate_up)
    device_of("gate_up", gate_up)
    rows, both = gate_up.shape
    check(both % 2 == 0, "gate_up", f"must have rows of two equal halves, got {both} elements")
    width = both // 2
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    check_tensor("out", out, (rows, width), gate_up.dtype, like=gate_up)
    tile = min(triton.next_power_of_2(width), _MAX_TILE)
    grid = (rows * triton.cdiv(width, tile),)
    _silu_and_mul_kernel[grid](gate_up, out, WIDTH=width, TILE=tile, num_warps=max(tile // 256, 1))
    return out
