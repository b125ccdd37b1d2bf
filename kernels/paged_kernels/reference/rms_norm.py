"""Reference for the root mean square norm, in float64."""

from __future__ import annotations

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Reference for `paged_kernels.rms_norm.rms_norm`, not rounded."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, not rounded, and the new residual, rounded to its dtype."""
    summed = (x.double() + residual.double()).to(residual.dtype)
    return rms_norm(summed, weight, eps), summed
