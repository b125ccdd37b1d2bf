"""Lists of words as token ids, in tensorrtllm_backend's format.

A list is an array [2, n]: the ids of all words one after the other, and the end of each word in
them. Both are padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_backend.serving import fields
from paged_backend.serving.contract import Array
from paged_backend.serving.requests.prompts import UTF8_BYTES
from paged_backend.values.errors import InvalidRequest

NO_WORD = -1  # the padding


def read_words(name: str, array: Array, max_words: int, max_length: int) -> list[list[int]]:
    """Return the token ids of each word.

    The limits are checked before the words are read, as any thread may read them.

    Args:
        name: name of the tensor.
        array: the tensor.
        max_words: maximum number of words.
        max_length: maximum number of tokens of a word.

    Raises:
        InvalidRequest: the array is not such a list, or a limit is exceeded.
    """
    if array.ndim < 2 or array.shape[-2] != 2:
        raise InvalidRequest(name, f"must have the shape [2, n], got {list(array.shape)}")
    flat, padded_ends = array.reshape(2, -1)
    is_padding = padded_ends == NO_WORD
    num_words = int(is_padding.argmax()) if is_padding.any() else len(padded_ends)
    if num_words > max_words:
        raise InvalidRequest(name, f"at most {max_words} words, got {num_words}")
    words, start = [], 0
    for end in padded_ends[:num_words].tolist():
        if not start < end <= len(flat):
            raise InvalidRequest(
                name, f"each end must be above {start} and at most {len(flat)}, got {end}"
            )
        if end - start > max_length:
            raise InvalidRequest(name, f"each has at most {max_length} tokens, got {end - start}")
        words.append(flat[start:end].tolist())
        start = end
    return words


def read_texts(name: str, tensor: Array, max_words: int, max_length: int) -> list[str]:
    """Return words that are given as text.

    Args:
        name: name of the tensor.
        tensor: its elements are the words.
        max_words: maximum number of words.
        max_length: maximum number of characters of a word.

    Raises:
        InvalidRequest: a limit is exceeded, or a word is not text.
    """
    texts = []
    for value in fields.elements(name, tensor, max_words):
        # The text of a value that is far too long is not decoded.
        if (
            len(value) > UTF8_BYTES * max_length
            or len(text := fields.text(name, value)) > max_length
        ):
            raise InvalidRequest(name, f"each has at most {max_length} characters")
        texts.append(text)
    return texts


def write_words(words: Sequence[Sequence[int]]) -> Array:
    """Return words as an array [2, n], where n is the number of their ids, or 1 without words."""
    flat = [token_id for word in words for token_id in word]
    ends = np.cumsum([len(word) for word in words], dtype=np.int32).tolist()
    length = max(1, len(flat))
    rows = [row + [NO_WORD] * (length - len(row)) for row in (flat, ends)]
    return np.array(rows, np.int32)
