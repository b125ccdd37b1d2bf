"""Given answers in place of what a model samples, so that a benchmark knows what is guessed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GivenAnswers:
    """Answers on the device, found by the seed of a request and the position of a token.

    Args:
        number: number of answers that are kept; seed + `number` takes the place of a seed.
        length: number of tokens of an answer at most.
        device: where they are.
    """

    def __init__(self, number: int, length: int, device: torch.device) -> None:
        self._tokens = torch.zeros(number, length, dtype=torch.int32, device=device)
        self._starts = torch.zeros(number, dtype=torch.int32, device=device)

    def give(self, seed: int, start: int, answer: Sequence[int]) -> None:
        """Set the answer of the request with a seed.

        Args:
            seed: the seed.
            start: number of tokens of the prompt.
            answer: the tokens that follow.
        """
        row = seed % len(self._tokens)
        self._tokens[row, : len(answer)] = torch.tensor(answer, dtype=torch.int32)
        self._starts[row] = start

    def tokens(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Return the token of each seed [n] int64 at each position [n] int32, [n] int32."""
        rows = seeds.remainder(len(self._tokens))
        places = (positions - self._starts[rows]).clamp(0, self._tokens.shape[1] - 1)
        return self._tokens[rows, places]
