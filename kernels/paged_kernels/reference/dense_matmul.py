"""Reference for products of 16-bit numbers, in float64."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def dense_matmul(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reference for `paged_kernels.dense_matmul.dense_matmul`, not rounded."""
    out = x.double() @ w.double().T
    return out if bias is None else out + bias.double()


def dense_matmul_silu_and_mul(x: Tensor, gate_up: Tensor) -> Tensor:
    """Reference for `paged_kernels.dense_matmul.dense_matmul_silu_and_mul`, not rounded."""
    gate, up = dense_matmul(x, gate_up).chunk(2, dim=1)
    return silu(gate) * up
