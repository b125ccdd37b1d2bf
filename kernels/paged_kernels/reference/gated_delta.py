"""Reference for linear attention by the gated delta rule, token by token in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels.reference.states import advance

EPS = 1e-6
"""Added to the squared length of a query or key before its root is taken."""


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Return the attention of each row to a state that it has corrected, not rounded.

    A state S holds what a key k should return as S^T k. A row lets it decay, and adds k times the
    part of its value v that is missing there: S' = exp(g) S; S = S' + k (beta (v - S'^T k))^T; its
    result is S^T q. See Yang et al., "Gated Delta Networks" (2024), section 3.1, and for the decay
    of each key channel Kimi Team, "Kimi Linear" (2025), section 3.

    Args:
        q, k: [num_tokens, num_key_heads, key_dim], of any length; they are divided by it, and
            queries by the root of key_dim. A key head serves neighboring value heads.
        v: [num_tokens, num_value_heads, value_dim].
        g: the logarithm of the decay, [num_tokens, num_value_heads], or for each key channel
            [num_tokens, num_value_heads, key_dim].
        beta: [num_tokens, num_value_heads].
        pool: [num_slots, num_value_heads, key_dim, value_dim]. It is changed.
        slots, query_start_loc: see `paged_kernels.reference.states.advance`.

    Returns:
        [num_tokens, num_value_heads, value_dim] float64.
    """
    repeats = v.shape[1] // k.shape[1]
    q = _normalized(q).repeat_interleave(repeats, dim=1) * q.shape[-1] ** -0.5
    k = _normalized(k).repeat_interleave(repeats, dim=1)
    decay = g.double().exp()
    if decay.dim() == 2:
        decay = decay.unsqueeze(-1)
    out = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
    for state, rows, _ in advance(pool, slots, query_start_loc):
        for row in rows:
            state *= decay[row].unsqueeze(-1)
            recalled = torch.einsum("hkv,hk->hv", state, k[row])
            missing = (v[row].double() - recalled) * beta[row].double().unsqueeze(-1)
            state += torch.einsum("hk,hv->hkv", k[row], missing)
            out[row] = torch.einsum("hkv,hk->hv", state, q[row])
    return out


def _normalized(heads: Tensor) -> Tensor:
    heads = heads.double()
    return heads / (heads.square().sum(-1, keepdim=True) + EPS).sqrt()
