"""Measures the gain of a cached prefix: TTFT with it and without."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from paged_backend.engine.engine import Engine
from paged_backend.tools.bench.requests import first_token_ms
from paged_backend.values.config import EngineConfig

SUFFIX_TOKENS = 32
REPEATS = 5


@dataclass(frozen=True, slots=True)
class PrefixFigures:
    """TTFT of a prompt, with its prefix in the cache and without."""

    prefix_tokens: int
    suffix_tokens: int
    ttft_ms_without: float
    ttft_ms_cached: float

    @property
    def speedup(self) -> float:
        """TTFT without the cache divided by TTFT with it."""
        return self.ttft_ms_without / self.ttft_ms_cached


def time_prefix(
    engine: Engine, config: EngineConfig, num_tokens: int, rng: np.random.Generator
) -> PrefixFigures | None:
    """Measure median TTFTs over prefixes that are each sent twice, with different suffixes.

    A prefix has at most ``num_tokens`` tokens, in whole blocks that fit the model's length. None if
    no block fits or prefix caching is off.
    """
    room = engine.limits.max_model_len - SUFFIX_TOKENS - 1
    length = min(num_tokens, room) // config.block_size * config.block_size
    if not config.enable_prefix_caching or length <= 0:
        return None
    without: list[float] = []
    cached: list[float] = []
    for _ in range(REPEATS):
        prefix, *suffixes = (
            rng.integers(engine.limits.vocab_size, size=size).tolist()
            for size in (length, SUFFIX_TOKENS, SUFFIX_TOKENS)
        )
        for times, suffix in zip((without, cached), suffixes, strict=True):
            times.append(first_token_ms(engine, prefix + suffix))
    return PrefixFigures(
        length, SUFFIX_TOKENS, statistics.median(without), statistics.median(cached)
    )
