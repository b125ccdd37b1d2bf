"""Reference for the products of experts, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    cubic: float = 0.0,
    gated: bool = True,
) -> Tensor:
    """Reference for `paged_kernels.experts.experts`, not rounded."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row, ids in enumerate(expert_ids.tolist()):
        for rank, expert in enumerate(ids):
            both = gate_up[expert].double() @ x[row].double()
            if gate_up_bias is not None:
                both += gate_up_bias[expert].double()
            if gated:
                gate, up = both[::2], both[1::2]
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                activated = (up + up_offset) * gate * (alpha * gate + cubic * gate**3).sigmoid()
            else:
                activated = both.relu().square()
            result = down[expert].double() @ activated
            if down_bias is not None:
                result += down_bias[expert].double()
            out[row] += result * expert_weights[row, rank].double()
    return out
