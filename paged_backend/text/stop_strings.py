"""Searches for stop strings in text that arrives in chunks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

_NUM_KEPT = 32  # automata of the last requests


class Match(NamedTuple):
    """The position of a stop string, in characters relative to the chunk that completed it."""

    start: int  # negative if it began in an earlier chunk
    end: int


class StopAutomaton:
    """An immutable automaton over all stop strings at once (Aho and Corasick, 1975).

    It has one state per character of the stop strings, of 16 bytes. The states of a stop string are
    numbered one after the other, so that only the stop strings that branch off need an entry of a
    dictionary.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._words = [""]
        self._following = array("i", [-1])  # state -> character that leads to the next number
        self._branches: dict[tuple[int, int], int] = {}  # state, other character -> state
        self._fallback = array("i", [0])
        self._depth = array("i", [0])  # characters of the longest suffix that begins a stop string
        self._match = array("i", [0])  # number of the longest suffix that is one; 0 for none
        sources: list[tuple[int, int]] = []  # parent of each state but the first, and character
        for stop in stop_strings:
            self._add(stop, sources)
        self._link(sources)

    @property
    def num_bytes(self) -> int:
        """The approximate size of the states."""
        arrays = (self._following, self._fallback, self._depth, self._match)
        return sum(part.itemsize * len(part) for part in arrays)

    def depth(self, state: int) -> int:
        """Return the length of the longest beginning of a stop string with which the text ends."""
        return self._depth[state]

    def match(self, state: int) -> str:
        """Return the longest stop string with which the text ends; empty if it ends with none."""
        return self._words[self._match[state]]

    def step(self, state: int, character: int) -> int:
        """Return the state after a code point."""
        while True:
            following = self._child(state, character)
            if following:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def _child(self, state: int, character: int) -> int:
        """Return the state of a stop string that goes on; 0 if none does."""
        if self._following[state] == character:
            return state + 1
        return self._branches.get((state, character), 0)

    def _add(self, stop: str, sources: list[tuple[int, int]]) -> None:
        state = 0
        for character in map(ord, stop):
            state = self._child(state, character) or self._new(state, character, sources)
        self._match[state] = len(self._words)
        self._words.append(stop)

    def _new(self, state: int, character: int, sources: list[tuple[int, int]]) -> int:
        number = len(self._depth)
        if number == state + 1:
            self._following[state] = character
        else:
            self._branches[state, character] = number
        sources.append((state, character))
        self._following.append(-1)
        self._fallback.append(0)
        self._depth.append(self._depth[state] + 1)
        self._match.append(0)
        return number

    def _link(self, sources: list[tuple[int, int]]) -> None:
        for state in sorted(range(1, len(self._depth)), key=self._depth.__getitem__):
            source, character = sources[state - 1]
            if source == 0:
                continue
            fallback = self.step(self._fallback[source], character)
            self._fallback[state] = fallback
            self._match[state] = self._match[state] or self._match[fallback]


@lru_cache(_NUM_KEPT)
def automaton_of(stop_strings: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of stop strings; the automata of the last calls are kept."""
    return StopAutomaton(stop_strings)


class StopMatcher:
    """Finds the stop strings of an automaton in one text.

    The match that ends first is returned, and of those the longest. The cost per character does not
    depend on the number of stop strings.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0

    @property
    def num_undecided(self) -> int:
        """Number of trailing characters that may be the beginning of a stop string."""
        return self._automaton.depth(self._state)

    @property
    def found(self) -> str:
        """The stop string that ends with the last character that was read; empty if none does."""
        return self._automaton.match(self._state)

    def find(self, piece: str) -> Match | None:
        """Read ``piece`` up to the first match; the rest of it is not read."""
        for position, character in enumerate(map(ord, piece), 1):
            self._state = self._automaton.step(self._state, character)
            if stop := self.found:
                return Match(position - len(stop), position)
        return None

    def skip(self, piece: str) -> None:
        """Read ``piece`` without matching; a later match must end after it."""
        for character in map(ord, piece):
            self._state = self._automaton.step(self._state, character)
