"""Reference for log-probabilities, in float64 and by sorting."""

from __future__ import annotations

from torch import Tensor

from paged_kernels.reference.sampling import repaired


def logprobs(logits: Tensor, token: int, number: int) -> tuple[float, int, list[int], list[float]]:
    """Return a token's log-probability and rank in a row [vocab], then top tokens and theirs."""
    x = repaired(logits)
    found = x.log_softmax(0)
    order = found.sort(descending=True, stable=True)
    rank = int((x >= x[token]).sum())
    top = order.indices[:number].tolist(), order.values[:number].tolist()
    return float(found[token]), rank, *top
