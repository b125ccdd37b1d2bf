"""Reference for the selective scan of Mamba-2, token by token in float64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_kernels.reference.states import advance


def selective_scan(
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
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Return the outputs of a state space with one decay for each head, not rounded.

    With t = softplus(dt + dt_bias) within its limits, a row turns the state S of a head into
    exp(t a) S + (t x) b^T, and its result is S c + d x. See Dao and Gu, "Transformers are SSMs"
    (2024), sections 5 and 6.

    Args:
        x: [num_tokens, heads, head_dim].
        dt: [num_tokens, heads].
        a: [heads] float32, negative.
        b, c: [num_tokens, groups, state_dim]; a group serves neighboring heads.
        d: [heads], or None for no such term.
        dt_bias: [heads], or None.
        pool: [num_slots, heads, head_dim, state_dim]. It is changed.
        slots, query_start_loc: see `paged_kernels.reference.states.advance`.
        dt_limits: the smallest and the largest time step.

    Returns:
        [num_tokens, heads, head_dim] float64.
    """
    repeats = x.shape[1] // b.shape[1]
    x, b, c = x.double(), b.double(), c.double()
    b, c = b.repeat_interleave(repeats, dim=1), c.repeat_interleave(repeats, dim=1)
    dt = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    dt = F.softplus(dt).clamp(*dt_limits)
    out = torch.zeros_like(x)
    for state, rows, _ in advance(pool, slots, query_start_loc):
        for row in rows:
            state *= (dt[row] * a.double()).exp()[:, None, None]
            state += torch.einsum("hp,hn->hpn", dt[row].unsqueeze(-1) * x[row], b[row])
            out[row] = torch.einsum("hpn,hn->hp", state, c[row])
    return out if d is None else out + d.double().unsqueeze(-1) * x
