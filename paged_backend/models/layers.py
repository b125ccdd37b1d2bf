"""The decoder's parts that are not matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [rows, size] to a root mean square of one, then by `weight` [size]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, the two halves of each row of `gate_up` [rows, 2 * size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class HeadNorm:
    """RMS norm of each head of queries and keys, with a weight for either."""

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
        self._counts = (num_heads, num_kv_heads)
        self._eps = eps
        self._weight: Tensor | None = None

    def __call__(self, qkv: Tensor) -> None:
        """Norm the queries and keys of `qkv` [rows, heads * head_dim] in place."""
        weight = self._weight
        if weight is None:
            weight = self._weight = self._weight_by_head()
        num_heads, head_dim = weight.shape
        heads = qkv.view(len(qkv), -1, head_dim)[:, :num_heads]
        torch.mul(F.rms_norm(heads, (head_dim,), None, self._eps), weight, out=heads)

    def _weight_by_head(self) -> Tensor:
        num_heads, num_kv_heads = self._counts
        return torch.cat((self.query.expand(num_heads, -1), self.key.expand(num_kv_heads, -1)))
