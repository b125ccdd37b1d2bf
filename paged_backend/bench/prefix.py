"""What a cached prefix saves: the time to the first token with it and without."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from paged_backend.bench.calls import drain, greedy
from paged_backend.config import EngineConfig
from paged_backend.engine import Engine

SUFFIX_TOKENS = 32
REPEATS = 5


@dataclass(frozen=True, slots=True)
class PrefixFigures:
    """Time to the first token of a prompt, with its beginning in the cache and without."""

    prefix_tokens: int
    suffix_tokens: int
    ttft_ms_without: float
    ttft_ms_cached: float

    @property
    def speedup(self) -> float:
        """Times faster with the cache."""
        return self.ttft_ms_without / self.ttft_ms_cached


def time_prefix(
    engine: Engine, config: EngineConfig, num_tokens: int, rng: np.random.Generator
) -> PrefixFigures | None:
    """Medians over prompts of which each is asked for twice, with different ends.

    The prefix has ``num_tokens`` or what fits of them in whole blocks; None if there is none.
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
            times.append(_first_token_ms(engine, prefix + suffix))
    return PrefixFigures(
        length, SUFFIX_TOKENS, statistics.median(without), statistics.median(cached)
    )


def _first_token_ms(engine: Engine, tokens: list[int]) -> float:
    started = time.perf_counter()
    engine.add_request(greedy("prefix", tokens))
    while not engine.step():
        pass
    seconds = time.perf_counter() - started
    engine.abort_request("prefix")
    drain(engine)
    return seconds * 1e3
