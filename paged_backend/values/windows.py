"""Windows of attention: the positions up to its own that a token of a layer sees."""

from __future__ import annotations

from typing import NamedTuple


class Chunks(NamedTuple):
    """The positions of a token's own chunk, if chunks of one size begin at position 0.

    Meta AI, "The Llama 4 herd" (2025), and the code of the model in transformers.

    Attributes:
        size: positions of a chunk.
    """

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


Window = int | Chunks
"""The number of the last positions that a token sees, its own included; or its chunk."""


def window_size(window: Window) -> int:
    """Return the most positions that a token sees."""
    return window.size if isinstance(window, Chunks) else window


def first_visible(position: int, window: Window) -> int:
    """Return the first position that a token sees; that of a later token is no smaller."""
    if isinstance(window, Chunks):
        return position // window.size * window.size
    return max(0, position - window + 1)


def num_visible(num_tokens: float, window: Window | None) -> float:
    """Return the number of positions that the last of `num_tokens` tokens sees.

    If there are several chunks, it is the mean of all places in a chunk.
    """
    if window is None:
        return num_tokens
    size = window_size(window)
    if isinstance(window, Chunks) and num_tokens > size:
        return (size + 1) / 2
    return min(num_tokens, size)
