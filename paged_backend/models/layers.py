"""The decoder's parts that are not matrix products, in plain torch for any device and dtype."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerFunctions(Protocol):
    """The functions below, as this module or `cpu_layers` has them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def norm_heads(self, qkv: Tensor, weight: Tensor, eps: float) -> None: ...
    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...


def layer_functions(device: torch.device, dtype: torch.dtype) -> LayerFunctions:
    """The fastest functions for a device and a dtype."""
    if device.type == "cpu" and dtype == torch.float32:
        # Imported here because numba exists only where the CPU serves.
        from paged_backend.models import cpu_layers

        return cpu_layers
    from paged_backend.models import layers

    return layers


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [rows, size] to a root mean square of one, then by `weight` [size]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """Norm, in place, as many heads of each row of `qkv` as `weight` [heads, head_dim] has."""
    num_heads, head_dim = weight.shape
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)[:, :num_heads]
    torch.mul(F.rms_norm(heads, (head_dim,), None, eps), weight, out=heads)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for the two halves of each row of `gate_up` [rows, 2 * size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
