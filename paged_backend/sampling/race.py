"""Draws tokens by their weights with the random numbers of a seed and a position.

The draw is a race (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006): the
token with the smallest Exp(1) / weight wins. The exponentials come from Philox4x32-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the key is the seed, the counter is
(token // 4, position, 0, 0), and a token takes word ``token % 4`` of the result. The GPU's kernel
draws in the same way, and ``paged_kernels.reference.sampling.draw`` defines both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba import float32, float64, int64, uint64
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec

_WORD = np.uint64(2**32 - 1)
_SHIFT = np.uint64(32)
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_NUM_ROUNDS = 10
# Types of arguments.
_FLOATS, _DOUBLES, _IDS = float32[:, ::1], float64[:, ::1], int64[:, ::1]
_STATE, _WINNERS = uint64[::1], int64[::1]


def race(weights: Tensor, samples: Sequence[SampleSpec]) -> list[int]:
    """Draw a token for each row of ``weights`` [n, vocab] float32, which need not add up to 1."""
    winners = np.zeros(len(samples), np.int64)
    _race_all(weights.contiguous().numpy(), *_random_state(samples), winners)
    tokens: list[int] = winners.tolist()
    return tokens


def race_among(weights: Tensor, token_ids: Tensor, samples: Sequence[SampleSpec]) -> list[int]:
    """Draw one of each row's ``token_ids`` [n, m] int64, with ``weights`` [n, m] float64."""
    winners = np.zeros(len(samples), np.int64)
    ids = token_ids.contiguous().numpy()
    _race_some(weights.contiguous().numpy(), ids, *_random_state(samples), winners)
    tokens: list[int] = winners.tolist()
    return tokens


def _random_state(samples: Sequence[SampleSpec]) -> tuple[Any, Any]:
    """Seeds and positions as arrays of 64 bits."""
    seeds = np.array([spec.seed for spec in samples], np.uint64)
    return seeds, np.array([spec.position for spec in samples], np.uint64)


def _inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function into each of its callers."""
    compiled: Callable[..., Any] = numba.njit(inline="always")(function)
    return compiled


def _compile(*arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile a function for these types when it is defined; its code is cached on disk."""

    def compile(function: Callable[..., None]) -> Callable[..., None]:
        signature = numba.void(*arguments)
        compiled: Callable[..., None] = numba.njit(signature, cache=True, nogil=True)(function)
        return compiled

    return compile


@_inline
def _philox(seed: Any, quad: Any, position: Any) -> Any:
    """Four random words of 32 bits, each in 64 bits."""
    a, b, c, d = np.uint64(quad), position, np.uint64(0), np.uint64(0)
    low, high = seed & _WORD, seed >> _SHIFT
    for _ in range(_NUM_ROUNDS):
        ac, cc = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = (cc >> _SHIFT) ^ b ^ low, cc & _WORD, (ac >> _SHIFT) ^ d ^ high, ac & _WORD
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return a, b, c, d


@_inline
def _time(word: Any, weight: Any, best: Any) -> Any:
    """Return the time of a token, Exp(1) / weight; infinity if a lower bound reaches ``best``."""
    u = (np.float64(word) + 0.5) * 2.0**-32
    if u >= best * weight:  # -log(1 - u) is larger still
        return np.inf
    return -math.log1p(-u) / weight


@_compile(_FLOATS, _STATE, _STATE, _WINNERS)
def _race_all(weights: Any, seeds: Any, positions: Any, winners: Any) -> None:
    num_rows, width = weights.shape
    for row in range(num_rows):
        best = np.inf
        for start in range(0, width, 4):
            end = min(start + 4, width)
            largest = weights[row, start]
            for token in range(start + 1, end):
                largest = max(largest, weights[row, token])
            if not largest > 0:  # most tokens, after a filter
                continue
            words = _philox(seeds[row], start // 4, positions[row])
            for token in range(start, end):
                weight = np.float64(weights[row, token])
                if weight > 0:
                    time = _time(words[token - start], weight, best)
                    if time < best:
                        best, winners[row] = time, token


@_compile(_DOUBLES, _IDS, _STATE, _STATE, _WINNERS)
def _race_some(weights: Any, token_ids: Any, seeds: Any, positions: Any, winners: Any) -> None:
    num_rows, width = weights.shape
    for row in range(num_rows):
        best = np.inf
        for place in range(width):
            weight, token = weights[row, place], token_ids[row, place]
            if weight > 0:
                words = _philox(seeds[row], token // 4, positions[row])
                time = _time(words[token % 4], weight, best)
                if time < best:
                    best, winners[row] = time, token
