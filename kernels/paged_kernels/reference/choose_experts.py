"""Reference for the routing of a mixture of experts, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def choose_experts(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference for `paged_kernels.choose_experts.choose_experts`, with weights in float64."""
    logits = logits.double()
    if bias is None and groups is None:
        keys = logits
    else:
        keys = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)
        keys = keys if bias is None else keys + bias.double()
    if groups is not None:
        count, chosen, num_scored = groups
        members = keys.view(len(keys), count, keys.shape[1] // count)
        totals = members.sort(dim=-1, descending=True)[0][..., :num_scored].sum(dim=-1)
        best = totals.sort(dim=-1, descending=True, stable=True)[1][:, :chosen]
        hidden = torch.ones_like(totals, dtype=torch.bool).scatter(1, best, False)
        keys = members.masked_fill(hidden.unsqueeze(2), -math.inf).flatten(1)
    ids = keys.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    picked = logits.gather(1, ids)
    if scoring == "softmax":
        weights = logits.softmax(dim=-1).gather(1, ids)
    else:
        weights = picked.sigmoid() if scoring == "sigmoid" else picked.softmax(dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights * scale
