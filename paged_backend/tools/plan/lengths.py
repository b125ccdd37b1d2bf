"""The request lengths that a plan assumes, and the tokens that a running sequence then holds.

Prompt and output lengths are independent and log-normal, with the requested means and one common
sigma, and are cut where they exceed the context; sigma 0 makes all requests equal. Means of equally
likely slices represent each distribution instead of random draws, so that plans are reproducible.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from statistics import NormalDist, fmean

from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.windows import Chunks, Window

_SLICES = 64  # per distribution


@dataclass(frozen=True, slots=True)
class Lengths:
    """Equally likely pairs of prompt length and output length, in tokens."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def lognormal(cls, input_len: int, output_len: int, sigma: float, context: int) -> Lengths:
        """Create log-normal lengths; the means are those before the cut to `context`."""
        prompts = [min(length, context - 1) for length in _slices(input_len, sigma)]
        outputs = _slices(output_len, sigma)
        pairs = itertools.product(prompts, outputs)
        return cls(tuple((prompt, min(output, context - prompt)) for prompt, output in pairs))

    @property
    def mean_input(self) -> float:
        """The mean number of tokens in a prompt."""
        return fmean(prompt for prompt, _ in self.pairs)

    @property
    def mean_output(self) -> float:
        """The mean number of tokens in an output."""
        return fmean(output for _, output in self.pairs)

    @property
    def mean_held(self) -> float:
        """The mean number of tokens that a running sequence holds at a random step.

        A sequence runs for one step per output token, so long outputs weigh more.
        """
        return self._seen_at_a_step(1)

    def mean_slots(self, block_size: int) -> float:
        """The mean number of slots in its blocks; a sequence's last block is partly empty."""
        return block_size * self._seen_at_a_step(block_size)

    def mean_blocks(self, layout: KVCacheLayout) -> float:
        """The mean number of blocks of a running sequence, without those before the windows."""
        windows = [window for window in layout.windows if window is not None]
        invisible = (
            sum(
                _sum_of_invisible(prompt + output, window, layout.block_size)
                - _sum_of_invisible(prompt, window, layout.block_size)
                for window in windows
            )
            for prompt, output in self.pairs
        )
        mean_invisible = sum(invisible) / sum(output for _, output in self.pairs)
        return layout.num_groups * self._seen_at_a_step(layout.block_size) - mean_invisible

    def _seen_at_a_step(self, block_size: int) -> float:
        sums = (
            _sum_of_blocks(prompt + output, block_size) - _sum_of_blocks(prompt, block_size)
            for prompt, output in self.pairs
        )
        return sum(sums) / sum(output for _, output in self.pairs)


def _slices(mean: int, sigma: float) -> list[int]:
    """The means of equally likely slices of the distribution, shortest first."""
    if sigma == 0:
        return [mean]
    # The fraction cdf(z) of all requests lies below z, and has cdf(z - sigma) of all tokens.
    normal = NormalDist()
    inner = [normal.inv_cdf(index / _SLICES) for index in range(1, _SLICES)]
    below = [0.0, *(normal.cdf(z - sigma) for z in inner), 1.0]
    return [max(1, round(mean * _SLICES * (high - low))) for low, high in itertools.pairwise(below)]


def _sum_of_blocks(num_tokens: int, block_size: int) -> int:
    """The sum, over n = 1 ... num_tokens, of the number of blocks that n tokens need."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def _sum_of_invisible(num_tokens: int, window: Window, block_size: int) -> int:
    """The sum, over n = 1 ... num_tokens, of the blocks that the last of n tokens sees no more."""
    if not isinstance(window, Chunks):
        return _sum_of_full_blocks(num_tokens - window, block_size)
    size = window.size
    full, rest = divmod(num_tokens, size)
    before = size * sum(chunk * size // block_size for chunk in range(full))
    return before + rest * (full * size // block_size)


def _sum_of_full_blocks(num_tokens: int, block_size: int) -> int:
    """The sum, over n = 1 ... num_tokens, of the number of blocks that n tokens fill."""
    full, rest = divmod(max(0, num_tokens) + 1, block_size)
    return block_size * full * (full - 1) // 2 + rest * full
