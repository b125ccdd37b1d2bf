"""Finds the last tokens of bad words whose other tokens a sequence has just produced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class _Node:
    """Words whose middle is the path to this node, from its last token to its first."""

    __slots__ = ("endings", "following")

    def __init__(self) -> None:
        self.following: dict[int, _Node] = {}  # by the token before those of the path
        self.endings: Ints | None = None  # [n, 2] the last two tokens of each word


class BadWords:
    """Bad words of two or more tokens, in a tree of the tokens before their last two.

    The host may not know yet the token of a sequence before the one to sample. The words that
    could end are therefore found by the tokens before that one: by a walk of at most the length of
    a word, however many words there are.

    Args:
        words: the token ids of each word.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._root = _Node()
        endings: dict[_Node, dict[tuple[int, int], None]] = {}
        for *middle, before, last in words:
            node = self._root
            for token in reversed(middle):
                node = node.following.setdefault(token, _Node())
            endings.setdefault(node, {})[before, last] = None
        for node, pairs in endings.items():
            node.endings = np.array(list(pairs), np.int64)

    def endings(self, token_ids: Sequence[int], start: int, end: int) -> list[Ints]:
        """Return the last two tokens of the words whose other tokens precede a position.

        Args:
            token_ids: tokens of a sequence; the one at `end` and later ones are not read.
            start: position of the first output token; words lie in the output.
            end: position of the token before the one to sample.

        Returns:
            arrays of pairs [n, 2]: if the first is the token at `end`, the second is forbidden.
        """
        found: list[Ints] = []
        node: _Node | None = self._root if end >= start else None
        while node is not None:
            if node.endings is not None:
                found.append(node.endings)
            end -= 1
            node = node.following.get(token_ids[end]) if end >= start else None
        return found
