"""Reference for products with scales for blocks, in float64."""

from __future__ import annotations

from torch import Tensor

from paged_kernels.block_scaled_matmul import BLOCK_SIZE


def block_scaled_matmul(
    x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Reference for `paged_kernels.block_scaled_matmul.block_scaled_matmul`, not rounded."""
    features, width = w.shape
    x_factors = x_scales.double().repeat_interleave(BLOCK_SIZE, 1)[:, :width]
    w_factors = w_scales.double().repeat_interleave(BLOCK_SIZE, 0)[:features]
    w_factors = w_factors.repeat_interleave(BLOCK_SIZE, 1)[:, :width]
    out = (x.double() * x_factors) @ (w.double() * w_factors).T
    return out if bias is None else out + bias.double()
