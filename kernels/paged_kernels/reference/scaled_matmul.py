"""Reference for products with a scale for each row and each feature, in float64."""

from __future__ import annotations

from torch import Tensor


def scaled_matmul(
    x: Tensor, x_scales: Tensor, w: Tensor, w_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Reference for `paged_kernels.scaled_matmul.scaled_matmul`, not rounded."""
    out = x.double() @ w.double().T * x_scales.double()[:, None] * w_scales.double()
    return out if bias is None else out + bias.double()
