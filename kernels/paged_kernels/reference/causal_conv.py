"""Reference for short causal convolutions of each channel, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.reference.states import advance


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    *,
    silu: bool,
) -> Tensor:
    """Return the sums of each channel's last inputs, times their weights, not rounded.

    Args:
        x: [num_tokens, channels].
        weight: [channels, width]; the last column is for the row itself.
        bias: [channels], added to the sums.
        pool: [num_slots, channels, width - 1], the last inputs of each sequence, oldest first.
            It is changed.
        slots, query_start_loc: see `paged_kernels.reference.states.advance`.
        silu: whether to apply SiLU to the results.

    Returns:
        [num_tokens, channels] float64.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for state, rows, _ in advance(pool, slots, query_start_loc):
        for row in rows:
            window = torch.cat((state, x[row].double().unsqueeze(-1)), dim=-1)
            out[row] = (window * weight.double()).sum(-1)
            state.copy_(window[:, 1:])
    if bias is not None:
        out += bias.double()
    return F.silu(out) if silu else out
