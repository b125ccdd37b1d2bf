"""Given answers in place of what a model samples, so that a benchmark knows what is guessed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GivenAnswers:
    """Answers on the device, found by the seed of a request and the position of a token.

    Args:
        number: number of answers that are kept; seed + `number` takes the place of a seed.
        max_model_len: the longest sequence.
        device: where they are.
    """

    def __init__(self, number: int, max_model_len: int, device: torch.device) -> None:
        self._tokens = torch.zeros(number, max_model_len, dtype=torch.int32, device=device)

    def give(self, seed: int, start: int, answer: Sequence[int]) -> None:
        """Set the answer of the request with a seed.

        Args:
            seed: the seed.
            start: number of tokens of the prompt.
            answer: the tokens that follow.
        """
        tokens = torch.tensor(answer, dtype=torch.int32)
        self._tokens[seed % len(self._tokens), start : start + len(answer)] = tokens

    def tokens(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Return the token of each seed [n] int64 at each position [n] int32, [n] int32."""
        places = positions.clamp(0, self._tokens.shape[1] - 1).long()
        return self._tokens[seeds.remainder(len(self._tokens)), places]
