"""Reference for the gated activations, in float64."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Reference for `paged_kernels.silu_and_mul.silu_and_mul`, not rounded."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Reference for `paged_kernels.silu_and_mul.gelu_tanh_and_mul`, not rounded."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
