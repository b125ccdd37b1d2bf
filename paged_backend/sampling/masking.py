"""Token masks on logits of the host, compiled by numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, int64, types, uint32

_WORD_BITS = 32
_ALL = np.uint32(2**32 - 1)
_WORDS = types.Array(uint32, 2, "C", readonly=True)
_INFINITY = np.int32(0x7F800000)  # the bits of the float
_ABSOLUTE = np.int32(0x7FFFFFFF)
_LOWEST = np.int32(-(2**31))


@numba.njit(  # type: ignore[untyped-decorator]  # numba has no types
    numba.void(float32[:, ::1], int64[::1], _WORDS),
    cache=True,
    nogil=True,
    error_model="numpy",
)
def apply_masks(logits: Any, rows: Any, words: Any) -> None:
    """Set the logits of tokens with bit 0 to minus infinity, in place.

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


@numba.njit(inline="always")  # type: ignore[untyped-decorator]  # numba has no types
def _rank(bits: Any) -> Any:
    """Return an integer that has the order of a float, given by its bits as int32.

    NaN and minus infinity are the lowest, and zeros are equal.
    """
    size = bits & _ABSOLUTE
    is_lowest = size > _INFINITY or (bits < 0 and size == _INFINITY)
    return _LOWEST if is_lowest else (-size if bits < 0 else size)


@numba.njit(inline="always")  # type: ignore[untyped-decorator]  # numba has no types
def _largest(bits: Any, word: Any) -> Any:
    """Return the largest rank of the tokens of a word that are allowed."""
    best = _LOWEST
    for bit in range(len(bits)):
        rank = _rank(bits[bit])
        best = max(best, rank if (word >> np.uint32(bit)) & np.uint32(1) else _LOWEST)
    return best


@numba.njit(  # type: ignore[untyped-decorator]  # numba has no types
    numba.void(float32[:, ::1], int64[::1], _WORDS, int64[::1]),
    cache=True,
    nogil=True,
    error_model="numpy",
)
def argmax_allowed(logits: Any, rows: Any, words: Any, tokens: Any) -> None:
    """Find the first of the largest logits among tokens with bit 1.

    Args:
        logits: [any, vocab_size].
        rows: [num_masks], the row of each mask.
        words: [num_masks, ceil(vocab_size / 32)].
        tokens: [num_masks], written. It is 0 where all allowed logits are NaN or minus infinity.
    """
    bits = logits.view(np.int32)
    for index in range(len(rows)):
        row = bits[rows[index]]
        best, start = _LOWEST, 0
        for place in range(words.shape[1]):
            if words[index, place] == 0:
                continue
            here = place * _WORD_BITS
            largest = _largest(row[here : here + _WORD_BITS], words[index, place])
            if largest > best:
                best, start = largest, here
        word, token = words[index, start // _WORD_BITS], 0
        if best > _LOWEST:
            while (
                not (word >> np.uint32(token)) & np.uint32(1) or _rank(row[start + token]) != best
            ):
                token += 1
        tokens[index] = start + token
