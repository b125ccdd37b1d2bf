"""Functions on states of sequences in plain torch, token by token in float64."""

from __future__ import annotations

import math

from paged_kernels.reference.causal_conv import causal_conv as exact_causal_conv
from paged_kernels.reference.gated_delta import gated_delta as exact_gated_delta
from paged_kernels.reference.linear_attention import linear_attention as exact_linear_attention
from paged_kernels.reference.mamba1_scan import mamba1_scan as exact_mamba1_scan
from paged_kernels.reference.rg_lru import rg_lru as exact_rg_lru
from paged_kernels.reference.selective_scan import selective_scan as exact_selective_scan
from torch import Tensor
from torch.nn.functional import softplus

from paged_backend.models.states import StateStep


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    step: StateStep,
    *,
    silu: bool,
) -> Tensor:
    """Convolve each channel with its last rows, see `StateFunctions.causal_conv`."""
    out = exact_causal_conv(x, weight, bias, pool, step.slots, step.query_start_loc, silu=silu)
    return out.to(x.dtype)


def delta_gates(
    shares: Tensor, rates: Tensor, decay: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute decays and shares, see `StateFunctions.delta_gates`."""
    return decay * softplus(rates + dt_bias), shares.sigmoid()


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Compute linear attention by the gated delta rule, see `StateFunctions.gated_delta`."""
    return exact_gated_delta(q, k, v, g, beta, pool, step.slots, step.query_start_loc).to(v.dtype)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Compute linear attention with fixed decays, see `StateFunctions.linear_attention`."""
    out = exact_linear_attention(q, k, v, slopes, pool, step.slots, step.query_start_loc)
    return out.to(v.dtype)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    step: StateStep,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Compute the selective scan of Mamba-2, see `StateFunctions.selective_scan`."""
    out = exact_selective_scan(
        x, dt, a, b, c, d, dt_bias, pool, step.slots, step.query_start_loc, dt_limits=dt_limits
    )
    return out.to(x.dtype)


def mamba1_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Compute the selective scan of Mamba, see `StateFunctions.mamba1_scan`."""
    state = pool, step.slots, step.query_start_loc
    return exact_mamba1_scan(x, dt, a, b, c, d, dt_bias, *state).to(x.dtype)


def rg_lru(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    recurrent_param: Tensor,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Compute a real-gated linear recurrent unit, see `StateFunctions.rg_lru`."""
    gates = input_gate, recurrent_gate, recurrent_param
    return exact_rg_lru(x, *gates, pool, step.slots, step.query_start_loc).to(x.dtype)
