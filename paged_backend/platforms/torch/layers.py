"""The functions on rows of hidden states in plain torch, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.models.linear import LinearMethod


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [rows, size] to a root mean square of 1, then by `weight` [size]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(hidden: Tensor, linear: LinearMethod, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
    linear.add_to(hidden, x)
    return rms_norm(hidden, weight, eps)


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """Apply the RMS norm to each query and key head of `qkv`, in place.

    `qkv` [rows, size] has the query heads, the key heads and the value heads of each token, with
    `head_dim` values each. `weight` [num_heads, head_dim] has a row for each query and key head.
    """
    num_heads, head_dim = weight.shape
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)[:, :num_heads]
    torch.mul(F.rms_norm(heads, (head_dim,), None, eps), weight, out=heads)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for the two halves of each row of `gate_up` [rows, 2 * size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
