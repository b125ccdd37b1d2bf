"""The functions on rows of hidden states, as Triton kernels."""

from __future__ import annotations

from paged_kernels.choose_experts import choose_experts as choose_experts_kernel
from paged_kernels.rms_norm import add_rms_norm, rms_norm
from paged_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from torch import Tensor

from paged_backend.checkpoint.moe import Routing
from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import LinearMethod, RowFunction
from paged_backend.platforms.gpu.linear import DenseLinear
from paged_backend.platforms.portable.layers import (
    add,
    gelu,
    layer_norm,
    multiply_heads,
    multiply_sigmoid,
    multiply_silu,
)

__all__ = [
    "add",
    "add_gated",
    "add_norm",
    "choose_experts",
    "gated",
    "gelu",
    "layer_norm",
    "multiply_heads",
    "multiply_sigmoid",
    "multiply_silu",
    "rms_norm",
]

_ACTIVATIONS = {Activation.SILU: silu_and_mul, Activation.GELU_TANH: gelu_tanh_and_mul}


def add_norm(
    hidden: Tensor,
    linear: RowFunction,
    x: Tensor,
    weight: Tensor,
    eps: float,
    reader: LinearMethod | None = None,
) -> Tensor:
    """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
    return add_rms_norm(linear(x), hidden, weight, eps)


def gated(linear: RowFunction, x: Tensor, activation: Activation) -> Tensor:
    """See `platforms.portable.layers.gated`."""
    if activation is Activation.SILU and isinstance(linear, DenseLinear):
        return linear.silu_and_mul(x)
    return _ACTIVATIONS[activation](linear(x))


def add_gated(out: Tensor, x: Tensor, gate: Tensor) -> None:
    """See `platforms.portable.layers.add_gated`."""
    out.addcmul_(x, gate.sigmoid())


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `platforms.portable.layers.choose_experts`."""
    groups = routing.groups
    return choose_experts_kernel(
        logits.contiguous(),
        routing.num_experts_per_tok,
        scoring=routing.scoring.value,
        normalize=routing.norm_topk_prob,
        scale=routing.scale,
        bias=bias,
        groups=None if groups is None else (groups.count, groups.chosen, groups.num_scored),
    )
