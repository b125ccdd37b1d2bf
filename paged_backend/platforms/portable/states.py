"""Functions on states of sequences in plain torch, token by token in float64."""

from __future__ import annotations

from paged_kernels.reference.causal_conv import causal_conv
from paged_kernels.reference.gated_delta import gated_delta
from torch import Tensor


class TorchStates:
    """See :class:`~paged_backend.models.states.StateFunctions`."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pool: Tensor,
        slots: Tensor,
        query_start_loc: Tensor,
        *,
        silu: bool,
    ) -> Tensor:
        """Convolve each channel with its last rows."""
        out = causal_conv(x, weight, bias, pool, slots, query_start_loc, silu=silu)
        return out.to(x.dtype)

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        pool: Tensor,
        slots: Tensor,
        query_start_loc: Tensor,
    ) -> Tensor:
        """Compute linear attention by the gated delta rule."""
        return gated_delta(q, k, v, g, beta, pool, slots, query_start_loc).to(v.dtype)
