"""Reference for masks of allowed tokens, decided bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def masked(logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """Return logits [any, vocab] in which the tokens that a row's mask forbids are impossible."""
    out = logits.clone()
    for row, words in zip(rows.tolist(), masks.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if words[token // 32] >> (token % 32) & 1 == 0:
                out[row, token] = -torch.inf
    return out
