"""What followed each token of a text last, and whether the same token had followed before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BULK = 32  # number of tokens from which numpy is faster than a loop
_MULTIPLIER, _WORD = 0x9E3779B1, 0xFFFFFFFF


class Followers:
    """A hash table by token; tokens with the same hash share an entry, which misses some repeats.

    In lines of code, for example, a few tokens are followed by another one each time, such as the
    next name, and most tokens by the one that followed them before.

    Args:
        bits: binary logarithm of the number of entries, at most 32.
        last: the token before the text.
    """

    def __init__(self, bits: int, last: int) -> None:
        self._shift = 32 - bits
        self._last = last
        # Views, because a loop reads them faster than arrays.
        self._newest = np.full(1 << bits, last, np.int32).data
        self._is_steady = bytearray(1 << bits)  # 0 or 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the text."""
        if len(token_ids) >= _BULK:
            self._extend_at_once(np.array(token_ids, np.int64))
            return
        newest, is_steady, shift, last = self._newest, self._is_steady, self._shift, self._last
        for token_id in token_ids:
            place = (last * _MULTIPLIER & _WORD) >> shift
            is_steady[place] = newest[place] == token_id
            newest[place] = last = token_id
        self._last = last

    def are_steady(self, token_ids: Sequence[int]) -> list[bool]:
        """Return for each token whether the same token followed it the last two times."""
        is_steady, shift = self._is_steady, self._shift
        places = [(token_id * _MULTIPLIER & _WORD) >> shift for token_id in token_ids]
        return [is_steady[place] == 1 for place in places]

    def _extend_at_once(self, token_ids: NDArray[np.int64]) -> None:
        before = np.append(self._last, token_ids[:-1])
        self._last = int(token_ids[-1])
        places = (before * _MULTIPLIER & _WORD) >> self._shift
        # Tokens with one place follow each other, and each but the first has its predecessor there.
        order = np.argsort(places, kind="stable")
        places, following = places[order], token_ids[order]
        is_first = np.append(True, places[1:] != places[:-1])
        newest = np.asarray(self._newest)
        earlier = np.where(is_first, newest[places], np.roll(following, 1))
        is_last = np.append(is_first[1:], True)
        places = places[is_last]
        np.frombuffer(self._is_steady, np.bool_)[places] = (earlier == following)[is_last]
        newest[places] = following[is_last]
