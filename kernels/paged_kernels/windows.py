"""Windows of attention: the positions up to its own that a token sees."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Chunks(NamedTuple):
    """The positions of a token's own chunk, if chunks of one size begin at position 0 (Llama 4)."""

    size: int


Window = int | Chunks
"""The number of the last positions that a token sees, its own included; or its chunk."""


class WindowConstants(NamedTuple):
    """A window as kernels take it."""

    WINDOW: int | None  # the most positions that a token sees; None for all up to its own
    CHUNKED: bool  # whether they are those of its chunk

    @classmethod
    def of(cls, window: Window | None) -> WindowConstants:
        """Return the constants of a window."""
        if isinstance(window, Chunks):
            return cls(window.size, True)
        return cls(window, False)


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first position that tokens at `position`, at least 0, see with a window."""
    if CHUNKED:
        first = position // WINDOW * WINDOW
    else:
        first = tl.maximum(position - WINDOW + 1, 0)
    return first
