"""The functions on rows of hidden states, as Triton kernels."""

from __future__ import annotations

from paged_kernels.rms_norm import add_rms_norm, rms_norm
from paged_kernels.silu_and_mul import silu_and_mul
from torch import Tensor

from paged_backend.models.linear import LinearMethod

__all__ = ["add_norm", "rms_norm", "silu_and_mul"]


def add_norm(hidden: Tensor, linear: LinearMethod, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
    return add_rms_norm(linear(x), hidden, weight, eps)
