"""Reference for the routing of a mixture of experts, in float64."""

from __future__ import annotations

from torch import Tensor


def choose_experts(
    logits: Tensor, top_k: int, *, scoring: str = "softmax", normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """Reference for `paged_kernels.choose_experts.choose_experts`, with weights in float64."""
    logits = logits.double()
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    chosen, ids = ordered[:, :top_k], ids[:, :top_k]
    if scoring == "softmax":
        weights = logits.softmax(dim=-1).gather(1, ids)
    else:
        weights = chosen.sigmoid() if scoring == "sigmoid" else chosen.softmax(dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights
