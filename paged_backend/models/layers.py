"""The decoder's parts that are not matrix products, in plain torch for any device and dtype."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.models.devices import kernels_run_on
from paged_backend.models.linear import Linear


class LayerFunctions(Protocol):
    """The functions below, as this module, `cpu_layers` or `triton_layers` has them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_norm(
        self, hidden: Tensor, linear: Linear, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor: ...
    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...


def layer_functions(device: torch.device, dtype: torch.dtype) -> LayerFunctions:
    """The fastest functions for a device and a dtype."""
    if kernels_run_on(device):
        # Imported here because Triton exists only where there is a GPU or its interpreter.
        from paged_backend.models import triton_layers

        return triton_layers
    if device.type == "cpu" and dtype == torch.float32:
        # Imported here because numba exists only where the CPU serves.
        from paged_backend.models import cpu_layers

        return cpu_layers
    from paged_backend.models import layers

    return layers


class HeadNorm:
    """The norm of each head of the queries and the keys (Qwen3).

    Made unfilled, as a `Linear`: fill `query` and `key`, then call `pack`.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.query = torch.empty(head_dim, dtype=dtype, device=device)
        self.key = torch.empty(head_dim, dtype=dtype, device=device)
        self.eps = eps
        self.heads = torch.empty(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
        self._num_heads = num_heads

    def pack(self) -> None:
        """Give each head its weight, for kernels that know no kinds of heads."""
        self.heads[: self._num_heads] = self.query
        self.heads[self._num_heads :] = self.key


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [rows, size] to a root mean square of one, then by `weight` [size]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_norm(hidden: Tensor, linear: Linear, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
    linear.add_to(hidden, x)
    return rms_norm(hidden, weight, eps)


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """Norm, in place, as many heads of each row of `qkv` as `weight` [heads, head_dim] has."""
    num_heads, head_dim = weight.shape
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)[:, :num_heads]
    torch.mul(F.rms_norm(heads, (head_dim,), None, eps), weight, out=heads)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for the two halves of each row of `gate_up` [rows, 2 * size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
