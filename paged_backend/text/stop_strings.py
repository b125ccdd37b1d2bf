"""Searches for stop strings in text that arrives in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """The position of a stop string, in characters relative to the chunk that completed it."""

    start: int  # negative if it began in an earlier chunk
    end: int


class StopMatcher:
    """An automaton over all stop strings at once (Aho and Corasick, 1975).

    The match that ends first is returned, and of those the longest. The cost per character does not
    depend on the number of stop strings.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # state -> character -> state
        self._depth = [0]  # characters of the longest suffix that begins a stop string
        self._match = [""]  # the longest suffix that is one; empty for none
        self._fallback = [0]
        self._state = 0
        for stop in stop_strings:
            self._add(stop)
        self._link()

    @property
    def num_undecided(self) -> int:
        """Number of trailing characters that may be the beginning of a stop string."""
        return self._depth[self._state]

    @property
    def found(self) -> str:
        """The stop string that ends with the last character that was read; empty if none does."""
        return self._match[self._state]

    def find(self, piece: str) -> Match | None:
        """Read ``piece`` up to the first match; the rest of it is not read."""
        for position, character in enumerate(piece, 1):
            self._state = self._step(self._state, character)
            stop = self._match[self._state]
            if stop:
                return Match(position - len(stop), position)
        return None

    def skip(self, piece: str) -> None:
        """Read ``piece`` without matching; a later match must end after it."""
        for character in piece:
            self._state = self._step(self._state, character)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append("")
                self._fallback.append(0)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                fallback = self._step(self._fallback[state], character)
                self._fallback[following] = fallback
                self._match[following] = self._match[following] or self._match[fallback]
                queue.append(following)

    def _step(self, state: int, character: str) -> int:
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]
