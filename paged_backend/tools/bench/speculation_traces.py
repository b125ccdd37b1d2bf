"""Prompts and answers that repeat themselves as real ones do, and some that do not.

Random weights answer nothing of the kind, so that the answers are given. All texts are made of
token ids by a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

ANSWER_TOKENS = 256
_FIRST_TOKEN = 16  # ids below it may be special tokens
_NUM_WORDS = 2000
_CHANGED = 0.03  # part of the words that an edit changes


class Trace(NamedTuple):
    """A prompt, and the answer that a model would give."""

    prompt: list[int]
    answer: list[int]


class _Language:
    """Words of 1 to 3 tokens. A few of them are used often, as in Zipf's law."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._words = [self.tokens(rng.choice((1, 1, 2, 3))) for _ in range(_NUM_WORDS)]

    def tokens(self, number: int) -> list[int]:
        """Return random tokens."""
        return [self._rng.randrange(_FIRST_TOKEN, self._vocab_size) for _ in range(number)]

    def words(self, number: int) -> list[list[int]]:
        """Return random words."""
        places = (int(self._rng.paretovariate(1.0)) - 1 for _ in range(number))
        return [self._words[min(place, _NUM_WORDS - 1)] for place in places]

    def text(self, number: int) -> list[int]:
        """Return the tokens of random words."""
        return _joined(self.words(number))


def _edit(language: _Language, rng: random.Random) -> Trace:
    """A document, and the document with a few words changed."""
    document = language.words(200)
    edited = [language.words(1)[0] if rng.random() < _CHANGED else word for word in document]
    return Trace(_joined(document) + language.text(10), _joined(edited))


def _json(language: _Language, rng: random.Random) -> Trace:
    """Records with the same keys in the same order, and values from a few."""
    opening, colon, comma = language.tokens(3)
    keys = [language.text(2) for _ in range(6)]
    values = [language.text(1) for _ in range(40)]
    record = [
        token
        for _ in range(20)
        for key in keys
        for token in (opening, *key, colon, *rng.choice(values), comma)
    ]
    return Trace(language.text(60), record)


def _code(language: _Language, rng: random.Random) -> Trace:
    """Lines of a few forms, with names from a few; the prompt has such lines, too."""
    names = [language.text(1) for _ in range(12)]
    forms = [
        [None if rng.random() < 0.25 else language.tokens(1) for _ in range(rng.randint(5, 14))]
        for _ in range(8)
    ]

    def lines(number: int) -> list[int]:
        chosen = [part for _ in range(number) for part in rng.choice(forms)]
        return _joined([rng.choice(names) if part is None else part for part in chosen])

    return Trace(lines(30), lines(60))


def _random(language: _Language, rng: random.Random) -> Trace:
    """Tokens of which none can be guessed."""
    return Trace(language.tokens(ANSWER_TOKENS), language.tokens(ANSWER_TOKENS))


KINDS: Mapping[str, Callable[[_Language, random.Random], Trace]] = MappingProxyType(
    {"edit": _edit, "json": _json, "code": _code, "random": _random}
)


def traces(kind: str, number: int, vocab_size: int, seed: int) -> list[Trace]:
    """Make traces of one of the `KINDS`, with answers of `ANSWER_TOKENS` tokens."""
    rng = random.Random(f"{kind} {seed}")
    made = []
    for _ in range(number):
        prompt, answer = KINDS[kind](_Language(rng, vocab_size), rng)
        made.append(Trace(prompt, (answer * ANSWER_TOKENS)[:ANSWER_TOKENS]))
    return made


def _joined(words: list[list[int]]) -> list[int]:
    return [token for word in words for token in word]
