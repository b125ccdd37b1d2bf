"""Reference for linear attention with a fixed decay for each head, token by token in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels.reference.states import advance


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
) -> Tensor:
    """Return the attention of each row to the sum of earlier keys and values, not rounded.

    A row turns the state S of a head into exp(-slope) S + k v^T, and its result is S^T q, without
    a scale. See Qin et al., "Lightning Attention-2" (2024), section 3.

    Args:
        q, k: [num_tokens, heads, key_dim].
        v: [num_tokens, heads, value_dim].
        slopes: [heads] float32, positive.
        pool: [num_slots, heads, key_dim, value_dim]. It is changed.
        slots, query_start_loc: see `paged_kernels.reference.states.advance`.

    Returns:
        [num_tokens, heads, value_dim] float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    decay = (-slopes.double()).exp()[:, None, None]
    out = torch.zeros_like(v)
    for state, rows, _ in advance(pool, slots, query_start_loc):
        for row in rows:
            state *= decay
            state += torch.einsum("hk,hv->hkv", k[row], v[row])
            out[row] = torch.einsum("hkv,hk->hv", state, q[row])
    return out
