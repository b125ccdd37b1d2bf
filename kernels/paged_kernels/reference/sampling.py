"""Reference for sampling, in float64 and by sorting."""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max
_MASK = 2**32 - 1


def probabilities(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Return the sampling distribution [vocab] float64 for logits [vocab]."""
    x = repaired(logits)
    if temperature < 1e-5 or top_k == 1 or x.max() == -torch.inf:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    weights = ((x - x.max()) / temperature).exp()
    weights[weights < min_p] = 0
    if 0 < top_k < len(x):
        weights[weights < weights.sort(descending=True).values[top_k - 1]] = 0
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        last = (ordered.cumsum(0) < top_p * weights.sum()).sum()
        weights[weights < ordered[last]] = 0
    return weights / weights.sum()


def draw(probabilities: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per (seed, position) pair from one distribution: [n] int64."""
    tokens = torch.arange(len(probabilities))
    zero = torch.tensor(0)
    counter = [tokens // 4, positions.long().unsqueeze(-1), zero, zero]
    words = torch.stack(torch.broadcast_tensors(*philox(seeds.unsqueeze(-1), counter)), -1)
    place = (tokens % 4).view(-1, 1).expand(*words.shape[:-1], 1)
    word = words.gather(-1, place).squeeze(-1)
    times = -torch.log1p(-(word.double() + 0.5) * 2.0**-32)
    times = torch.where(probabilities > 0, times / probabilities, torch.inf)
    return times.argmin(-1)


def repaired(logits: Tensor) -> Tensor:
    """Return logits without NaN and plus infinity, in float64."""
    x = logits.double()
    return torch.where(x.isnan(), -torch.inf, x.clamp(max=_LARGEST))


def philox(key: Tensor, counter: list[Tensor]) -> list[Tensor]:
    """Return the four words of Philox4x32-10 (Salmon et al., 2011, section 3.3), in int64."""
    a, b, c, d = counter
    low, high = key & _MASK, key >> 32 & _MASK
    for _ in range(10):
        (a_high, a_low), (c_high, c_low) = _product(0xD2511F53, a), _product(0xCD9E8D57, c)
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return [a, b, c, d]


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and low 32-bit words of a product that may not fit in int64."""
    below = (word & 0xFFFF) * factor
    above = (word >> 16) * factor + (below >> 16)
    return above >> 16, (above & 0xFFFF) << 16 | below & 0xFFFF
