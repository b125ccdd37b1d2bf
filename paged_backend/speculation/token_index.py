"""Finds where the last tokens of a text have occurred before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paged_backend.speculation.followers import Followers

SEPARATOR = -1  # between texts; no token has this id
_MAX_VISITS = 32  # earlier places that a search compares
_MAX_FOLLOWER_BITS = 16  # more than most texts have different tokens
_BULK = 32  # number of tokens from which numpy is faster than a loop
_MULTIPLIER, _MIXER, _WORD = 0x9E3779B1, 0x85EBCA6B, 0xFFFFFFFF


class Match(NamedTuple):
    """Earlier places of the longest tail of a text that occurred before, the newest first."""

    length: int  # number of tokens that are equal
    ends: list[int]  # at each of them: the number of tokens in the index up to the match's end


class TokenIndex:
    """The newest tokens of one or several texts, with a hash table of short runs of tokens.

    It works like the search for repetitions in DEFLATE (RFC 1951, section 4): a table holds the
    newest place of each run of `key_length` tokens by its hash, and a chain leads from each place
    to the one before it with the same hash. A place is the number of tokens up to the end of the
    run, so that 0 stands for none. Its memory is 16 bytes per token of the window, and 320 KiB
    at most for what follows each token. Tokens that leave the window are forgotten, without any
    work.

    Args:
        window: number of tokens that are kept; it is rounded up to a power of two.
        key_length: number of tokens that a match has at least.

    Attributes:
        followers: what follows each token.
    """

    def __init__(self, window: int, key_length: int) -> None:
        bits = max((window - 1).bit_length(), 6)
        self._mask = (1 << bits) - 1
        self._shift = 32 - bits
        self._key_length = key_length
        self._num_tokens = 0
        self._first = 0  # number of tokens that were forgotten
        # Views, because a loop reads them faster than arrays.
        self._tokens = np.zeros(1 << bits, np.int32).data
        self._newest = np.zeros(1 << bits, np.int64).data  # place by hash
        # By place: the distance to the one before it.
        self._before = np.zeros(1 << bits, np.int32).data
        self.followers = Followers(min(bits + 2, _MAX_FOLLOWER_BITS), SEPARATOR)

    @property
    def window(self) -> int:
        """Number of tokens that are kept."""
        return self._mask + 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were added, forgotten ones included."""
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of a text."""
        if token_ids:
            self.followers.extend(token_ids)
        start = 0
        while len(token_ids) - start >= _BULK:
            end = min(start + self._mask + 1, len(token_ids))
            self._extend_at_once(np.array(token_ids[start:end], dtype=np.int32))
            start = end
        for token_id in token_ids[start:]:
            self._tokens[self._num_tokens & self._mask] = token_id
            self._num_tokens += 1
            if self._num_tokens >= self._key_length:
                key = self._last(self._key_length)
                self._add(self._hash(key))

    def forget_before(self, place: int) -> None:
        """Forget the first `place` tokens, if the window still has any of them."""
        self._first = max(self._first, place)

    def find(self, tail: Sequence[int], max_length: int) -> Match:
        """Find the longest end of a text that occurs in the index, before the index's last token.

        Args:
            tail: the last tokens of the text.
            max_length: number of tokens to compare; all longer matches are equally good.
        """
        best, ends = 0, list[int]()
        max_length = min(max_length, len(tail))
        if max_length >= self._key_length:
            whole = list(tail[-max_length:])
            tokens, mask = self._tokens, self._mask
            for end in self._places(self._hash(tail[-self._key_length :])):
                # A place with another token there has a shorter match.
                if best and tokens[(end - best) & mask] != whole[-best]:
                    continue
                length = self._match_length(whole, end)
                if length > best:
                    best, ends = length, []
                if length == best:
                    ends.append(end)
        return Match(best, ends) if best >= self._key_length else Match(0, [])

    def following(self, end: int, count: int) -> list[int]:
        """Return up to `count` tokens that follow a place, in the same text."""
        found = self._slice(end, min(end + count, self._num_tokens))
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def around(self, end: int, before: int, after: int) -> tuple[int, list[int]]:
        """Return the tokens around a place that are in the same text.

        Args:
            end: the place.
            before: number of tokens before it at most.
            after: number of tokens after it at most.

        Returns:
            The place of the first token, and the tokens.
        """
        earlier = self._slice(max(end - before, self._oldest), end)
        if SEPARATOR in earlier:
            earlier = earlier[len(earlier) - earlier[::-1].index(SEPARATOR) :]
        return end - len(earlier), earlier + self.following(end, after)

    @property
    def _oldest(self) -> int:
        return max(self._num_tokens - self._mask - 1, self._first)

    def _last(self, number: int) -> list[int]:
        return self._slice(self._num_tokens - number, self._num_tokens)

    def _slice(self, start: int, end: int) -> list[int]:
        first, number = start & self._mask, end - start
        found: list[int] = self._tokens[first : first + number].tolist()
        # The rest lies at the start of the ring.
        return found + self._tokens[: number - len(found)].tolist()

    def _hash(self, key: Sequence[int]) -> int:
        value = 0
        for token_id in key:
            value = (value * _MULTIPLIER + token_id + 1) & _WORD
        return (value * _MIXER & _WORD) >> self._shift

    def _add(self, hashed: int) -> None:
        """Make the end of the index the newest place with a hash."""
        end = self._num_tokens
        self._before[end & self._mask] = min(end - self._newest[hashed], self._mask + 1)
        self._newest[hashed] = end

    def _extend_at_once(self, token_ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        """Add at most as many tokens as the window has."""
        known = np.array(self._last(min(self._key_length - 1, self._num_tokens)), dtype=np.int32)
        text = np.concatenate([known, token_ids])
        first, mask = self._num_tokens, self._mask
        self._num_tokens += len(token_ids)
        np.asarray(self._tokens)[(first + np.arange(len(token_ids))) & mask] = token_ids
        num_keys = len(text) - self._key_length + 1
        if num_keys <= 0:
            return
        hashes = np.zeros(num_keys, dtype=np.uint64)
        for i in range(self._key_length):
            hashes *= np.uint64(_MULTIPLIER)
            hashes += (text[i : i + num_keys] + 1).astype(np.uint64)
            hashes &= np.uint64(_WORD)
        hashes = (hashes * np.uint64(_MIXER) & np.uint64(_WORD)) >> np.uint64(self._shift)
        ends = self._num_tokens - num_keys + 1 + np.arange(num_keys)
        # Places with one hash follow each other, and each but the first has its predecessor there.
        order = np.argsort(hashes, kind="stable")
        hashes, ends = hashes[order].astype(np.int64), ends[order]
        is_first = np.append(True, hashes[1:] != hashes[:-1])
        newest = np.asarray(self._newest)
        earlier = np.where(is_first, newest[hashes], np.roll(ends, 1))
        np.asarray(self._before)[ends & mask] = np.minimum(ends - earlier, mask + 1)
        is_last = np.append(is_first[1:], True)
        newest[hashes[is_last]] = ends[is_last]

    def _places(self, hashed: int) -> Iterator[int]:
        """Yield places with a hash that a token follows, the newest first."""
        place = self._newest[hashed]
        oldest = self._oldest + self._key_length
        visits = 0
        while place >= oldest and visits < _MAX_VISITS:
            if place < self._num_tokens:
                visits += 1
                yield place
            place -= self._before[place & self._mask]

    def _match_length(self, tail: list[int], end: int) -> int:
        limit = min(len(tail), end - self._oldest)
        tokens, mask = self._tokens, self._mask
        may_be_equal = limit == len(tail) and tokens[(end - limit) & mask] == tail[0]
        if may_be_equal and self._slice(end - limit, end) == tail:
            return limit
        for i in range(1, limit + 1):
            if tokens[(end - i) & mask] != tail[-i]:
                return i - 1
        return limit
