"""Reference for the real-gated linear recurrent unit, token by token in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.reference.states import advance

SHARPNESS = 8.0
"""Multiplies the logarithm of the decay."""


def rg_lru(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    recurrent_param: Tensor,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Return the states after each row, not rounded.

    With log(a) = -8 sigmoid(recurrent_gate) softplus(recurrent_param), a row turns the state h of
    a channel into a h + sqrt(1 - a^2) sigmoid(input_gate) x. The first row of a text, which reads
    slot 0, has a factor of 1 in place of the root. See De et al., "Griffin" (2024), section 2.4.

    Args:
        x: [num_tokens, width].
        input_gate, recurrent_gate: [num_tokens, width], before the sigmoid.
        recurrent_param: [width].
        pool: [num_slots, width]. It is changed.
        slots, query_start_loc: see `paged_kernels.reference.states.advance`.

    Returns:
        [num_tokens, width] float64.
    """
    rate = F.softplus(recurrent_param.double())
    log_decay = -SHARPNESS * recurrent_gate.double().sigmoid() * rate
    gated = x.double() * input_gate.double().sigmoid()
    out = torch.zeros_like(gated)
    for state, rows, is_first in advance(pool, slots, query_start_loc):
        for row in rows:
            factor = (-torch.expm1(2 * log_decay[row])).sqrt()
            if is_first and row == rows.start:
                factor = torch.ones_like(factor)
            state.copy_(log_decay[row].exp() * state + factor * gated[row])
            out[row] = state
    return out
