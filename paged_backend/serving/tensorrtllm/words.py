"""Lists of words as token ids, in tensorrtllm_backend's format.

A list is an array [2, n]: the ids of all words one after the other, and the end of each word in
them. Both are padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_backend.errors import InvalidRequest
from paged_backend.serving.contract import Array

NO_WORD = -1  # the padding


def read_words(name: str, array: Array) -> list[list[int]]:
    """Return the token ids of each word.

    Raises:
        InvalidRequest: the array is not such a list.
    """
    if array.ndim < 2 or array.shape[-2] != 2:
        raise InvalidRequest(name, f"must have the shape [2, n], got {list(array.shape)}")
    flat, ends = array.reshape(2, -1).tolist()
    words, start = [], 0
    for end in ends:
        if end == NO_WORD:
            break
        if not start < end <= len(flat):
            raise InvalidRequest(
                name, f"each end must be above {start} and at most {len(flat)}, got {end}"
            )
        words.append(flat[start:end])
        start = end
    return words


def write_words(words: Sequence[Sequence[int]]) -> Array:
    """Return words as an array [2, n], where n is the number of their ids, or 1 without words."""
    flat = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words], dtype=np.int32).tolist()
    length = max(1, len(flat))
    rows = [row + [NO_WORD] * (length - len(row)) for row in (flat, ends)]
    return np.array(rows, np.int32)
