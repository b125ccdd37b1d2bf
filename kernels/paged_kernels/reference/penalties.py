"""Reference for penalties, computed from lists of tokens in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def penalized(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
    forbidden: Sequence[int] = (),
) -> Tensor:
    """Return penalized logits [vocab]; `forbidden` holds the stop tokens if it may not stop."""
    x = logits.double()
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, occurrences in Counter(output).items():
        x[token] -= presence + frequency * occurrences
    x[list(forbidden)] = -torch.inf
    return x
