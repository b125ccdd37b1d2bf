"""Finds bad words of which a sequence has just produced all tokens but the last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


_NONE: Ints = np.empty((0, 2), np.int64)


class _Node:
    """Words with a middle that is the path to this node, from its last token to its first."""

    __slots__ = ("endings", "following")

    def __init__(self) -> None:
        self.following: dict[int, _Node] = {}  # by the token before the tokens of the path
        # [n, 2] the last two tokens of the words of this node and of those on the path to it
        self.endings = _NONE


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
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if node in endings:
                own = np.array(list(endings[node]), np.int64)
                node.endings = np.concatenate([node.endings, own])
            for child in node.following.values():
                child.endings = node.endings
                nodes.append(child)

    def endings(self, token_ids: Sequence[int], start: int, end: int) -> Ints:
        """Return the last two tokens of each word if its earlier tokens precede a position.

        Args:
            token_ids: tokens of a sequence; the one at `end` and later ones are not read.
            start: position of the first output token; words lie in the output.
            end: position of the token before the one to sample.

        Returns:
            pairs [n, 2]: if the first is the token at `end`, the second is forbidden.
        """
        if end < start:
            return _NONE
        node = self._root
        for position in range(end - 1, start - 1, -1):
            following = node.following.get(token_ids[position])
            if following is None:
                break
            node = following
        return node.endings
