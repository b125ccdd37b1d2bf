"""Reference for latent attention: gathers each sequence's rows, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def latent_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    rank: int,
    scale: float,
) -> Tensor:
    """Reference for `paged_kernels.latent_attention.latent_attention`, in float64."""
    outs = []
    starts = query_start_loc.tolist()
    for seq, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        length, block_size = int(seq_lens[seq]), cache.shape[1]
        used = block_table[seq, : -(-length // block_size)].long()
        rows = cache[used].flatten(0, 1)[:length].double()
        positions = torch.arange(length - (end - start), length, device=q.device)
        scores = torch.einsum("qhd,kd->hqk", q[start:end].double(), rows) * scale
        hidden = torch.arange(length, device=q.device) > positions[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        outs.append(torch.einsum("hqk,kr->qhr", weights, rows[:, :rank]))
    return torch.cat(outs)


def latent_rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """Return `x` [tokens, ..., row_size] with its rotary part turned, in float64."""
    angles = cos_sin_cache.double()[positions.long()]
    cos, sin = angles.view(len(x), *[1] * (x.dim() - 2), -1).chunk(2, dim=-1)
    rotary = cos_sin_cache.shape[1]
    plain, turning = x.double().split([x.shape[-1] - rotary, rotary], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    return torch.cat((plain, first * cos - second * sin, second * cos + first * sin), dim=-1)
