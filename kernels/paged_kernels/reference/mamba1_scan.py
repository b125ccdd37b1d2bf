"""Reference for the selective scan of Mamba, token by token in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.reference.states import advance


def mamba1_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Return the outputs of a state space with decays for each number of a state, not rounded.

    With t = softplus(dt + dt_bias), a row turns the state s of a channel into
    exp(t a) s + t x b, and its result is the product of s and c, plus d x. See Gu and Dao, "Mamba:
    Linear-Time Sequence Modeling with Selective State Spaces" (2023), sections 2 and 3.

    Args:
        x, dt: [num_tokens, inner].
        a: [inner, state_dim] float32, negative.
        b, c: [num_tokens, state_dim].
        d: [inner], or None for no such term.
        dt_bias: [inner], or None.
        pool: [num_slots, inner, state_dim]. It is changed.
        slots, query_start_loc: see `paged_kernels.reference.states.advance`.

    Returns:
        [num_tokens, inner] float64.
    """
    x, b, c = x.double(), b.double(), c.double()
    dt = F.softplus(dt.double() if dt_bias is None else dt.double() + dt_bias.double())
    out = torch.zeros_like(x)
    for state, rows, _ in advance(pool, slots, query_start_loc):
        for row in rows:
            state *= (dt[row].unsqueeze(-1) * a.double()).exp()
            state += (dt[row] * x[row]).unsqueeze(-1) * b[row]
            out[row] = state @ c[row]
    return out if d is None else out + d.double() * x
