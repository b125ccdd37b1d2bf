"""The functions of a GPU on states of sequences; see `models.states.StateFunctions`.

Prompts in 16 bits are computed in chunks by `gated_delta` with a decay for each head,
`selective_scan` and `linear_attention`. The others, and all in float32, compute them row by row.
"""

from __future__ import annotations

import math

import torch
from paged_kernels.causal_conv import causal_conv as causal_conv_kernel
from paged_kernels.gated_delta import gated_delta as gated_delta_kernel
from paged_kernels.linear_attention import linear_attention as linear_attention_kernel
from paged_kernels.mamba1_scan import mamba1_scan as mamba1_scan_kernel
from paged_kernels.rg_lru import rg_lru as rg_lru_kernel
from paged_kernels.selective_scan import selective_scan as selective_scan_kernel
from paged_kernels.state_chunks import CHUNK_ROWS, FEW_ROWS
from torch import Tensor

from paged_backend.models.states import StateStep
from paged_backend.platforms.portable.state_functions import delta_gates
from paged_backend.values.kv_cache_groups import StateChunks

__all__ = [
    "causal_conv",
    "chunks",
    "delta_gates",
    "gated_delta",
    "linear_attention",
    "mamba1_scan",
    "rg_lru",
    "selective_scan",
]


def chunks(dtype: torch.dtype) -> StateChunks | None:
    """Return the tokens that functions compute together for inputs of a dtype."""
    if dtype == torch.float32:
        return None
    return StateChunks(CHUNK_ROWS, FEW_ROWS)


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
    return causal_conv_kernel(x, weight, bias, pool, step.slots, step.query_start_loc, silu=silu)


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
    rows = step.slots, step.query_start_loc, step.seq_lens
    return gated_delta_kernel(q, k, v, g, beta, pool, *rows, num_decodes=step.num_decodes)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor,
    step: StateStep,
) -> Tensor:
    """Compute linear attention with fixed decays, see `StateFunctions.linear_attention`."""
    rows = step.slots, step.query_start_loc, step.seq_lens
    return linear_attention_kernel(q, k, v, slopes, pool, *rows, num_decodes=step.num_decodes)


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
    rows = step.slots, step.query_start_loc, step.seq_lens
    return selective_scan_kernel(
        x, dt, a, b, c, d, dt_bias, pool, *rows, dt_limits=dt_limits, num_decodes=step.num_decodes
    )


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
    return mamba1_scan_kernel(x, dt, a, b, c, d, dt_bias, pool, step.slots, step.query_start_loc)


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
    return rg_lru_kernel(x, *gates, pool, step.slots, step.query_start_loc)
