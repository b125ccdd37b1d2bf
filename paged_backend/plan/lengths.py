"""The lengths of requests that a plan assumes, and what a running sequence then holds.

Prompts and outputs are log-normal with the means asked for and one sigma, independent of each
other, cut where they exceed the context; sigma 0 makes them all alike. In place of random draws
stand the means of equally likely slices, so that a plan is the same each time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from statistics import NormalDist, fmean

_SLICES = 64  # of each of the two lengths


@dataclass(frozen=True, slots=True)
class Lengths:
    """Pairs of prompt and output length, all equally likely."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def lognormal(cls, input_len: int, output_len: int, sigma: float, context: int) -> Lengths:
        """Lengths with these means before the cut."""
        prompts = [min(length, context - 1) for length in _slices(input_len, sigma)]
        outputs = _slices(output_len, sigma)
        pairs = itertools.product(prompts, outputs)
        return cls(tuple((prompt, min(output, context - prompt)) for prompt, output in pairs))

    @property
    def mean_input(self) -> float:
        """Tokens of a prompt."""
        return fmean(prompt for prompt, _ in self.pairs)

    @property
    def mean_output(self) -> float:
        """Tokens of an output."""
        return fmean(output for _, output in self.pairs)

    @property
    def mean_held(self) -> float:
        """Tokens that a running sequence holds, seen at a random step.

        A sequence runs for as many steps as it has output tokens, so long outputs weigh more.
        """
        return self._seen_at_a_step(1)

    def mean_slots(self, block_size: int) -> float:
        """Slots of the blocks that hold them: the last block of a sequence is partly empty."""
        return block_size * self._seen_at_a_step(block_size)

    def _seen_at_a_step(self, block_size: int) -> float:
        sums = (
            _sum_of_blocks(prompt + output, block_size) - _sum_of_blocks(prompt, block_size)
            for prompt, output in self.pairs
        )
        return sum(sums) / sum(output for _, output in self.pairs)


def _slices(mean: int, sigma: float) -> list[int]:
    """Means of equally likely slices of the distribution, shortest first."""
    if sigma == 0:
        return [mean]
    # Below z lies the part cdf(z) of all requests, and cdf(z - sigma) of all their tokens.
    normal = NormalDist()
    inner = [normal.inv_cdf(index / _SLICES) for index in range(1, _SLICES)]
    below = [0.0, *(normal.cdf(z - sigma) for z in inner), 1.0]
    return [max(1, round(mean * _SLICES * (high - low))) for low, high in itertools.pairwise(below)]


def _sum_of_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks for 1, 2 ... num_tokens tokens, added up."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)
