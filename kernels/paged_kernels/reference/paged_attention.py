"""Reference for paged attention: gathers each sequence's keys and values, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paged_kernels.attention_params import AttentionParams
from paged_kernels.windows import Chunks


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    params: AttentionParams,
    *,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Reference for `paged_kernels.paged_attention`: output and log-sum-exp, both float64.

    Without `causal` every query sees all keys of its sequence.
    """
    outs, lses = [], []
    starts = query_start_loc.tolist()
    for seq, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        length = int(seq_lens[seq])
        k, v = gather(kv_cache, block_table[seq], length, params)
        positions = torch.arange(length - (end - start), length, device=q.device)
        out, lse = attend(q[start:end].double(), k, v, positions, params, causal)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def gather(
    kv_cache: Tensor, block_ids: Tensor, length: int, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Return a sequence's keys and values, each [length, num_kv_heads, head_dim] float64."""
    block_size, head_dim = kv_cache.shape[3:]
    used = block_ids[: -(-length // block_size)].long()
    blocks = kv_cache[used].double()
    if params.kv_scales is not None:
        blocks = blocks * params.kv_scales[used].double().unsqueeze(-1)
    k, v = blocks.permute(1, 0, 3, 2, 4).reshape(2, -1, kv_cache.shape[2], head_dim)[:, :length]
    if params.k_scale is not None:
        k = k * params.k_scale.double()[:, None]
    if params.v_scale is not None:
        v = v * params.v_scale.double()[:, None]
    return k, v


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, params: AttentionParams, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of one sequence's queries [n, num_heads, head_dim]."""
    num_heads = q.shape[1]
    k, v = (x.repeat_interleave(num_heads // k.shape[1], dim=1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * params.scale
    if params.softcap is not None:
        s = params.softcap * torch.tanh(s / params.softcap)
    distance = torch.arange(len(k), device=q.device) - positions[:, None]
    if causal:
        s = s.masked_fill(distance > 0, -math.inf)
    if isinstance(params.window, Chunks):
        chunks = torch.arange(len(k), device=q.device) // params.window.size
        own = (positions // params.window.size)[:, None]
        s = s.masked_fill(chunks != own, -math.inf)
    elif params.window is not None:
        s = s.masked_fill(distance <= -params.window, -math.inf)
    if params.sinks is not None and len(k):  # an extra key per head, without a value
        sink = params.sinks.double()[:, None, None].expand(-1, len(q), 1)
        s = torch.cat((s, sink), dim=2)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    lse = s.logsumexp(dim=-1)
    weights = torch.exp(s - lse.unsqueeze(-1)).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T
