"""Applies token masks to logits, compiled by numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, int64, types, uint32

_WORD_BITS = 32
_ALL = np.uint32(2**32 - 1)
_WORDS = types.Array(uint32, 2, "C", readonly=True)


@numba.njit(  # type: ignore[untyped-decorator]  # numba has no types
    numba.void(float32[:, ::1], int64[::1], _WORDS),
    cache=True,
    nogil=True,
    error_model="numpy",
)
def apply_masks(logits: Any, rows: Any, words: Any) -> None:
    """Set the logits of tokens whose bit is 0 to minus infinity, in place.

    Args:
        logits: [any, vocab_size].
        rows: [num_masks], the row of each mask.
        words: [num_masks, ceil(vocab_size / 32)].
    """
    vocab_size = logits.shape[1]
    for index in range(len(rows)):
        row = logits[rows[index]]
        for place in range(words.shape[1]):
            word = words[index, place]
            if word == _ALL:
                continue
            start = place * _WORD_BITS
            for bit in range(min(_WORD_BITS, vocab_size - start)):
                is_allowed = (word >> np.uint32(bit)) & np.uint32(1)
                row[start + bit] = row[start + bit] if is_allowed else -np.inf
