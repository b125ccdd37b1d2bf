"""Stop strings that contain special tokens, which the text of an answer leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from paged_backend.text.tokenizer import Tokenizer

_FIRST_MARK = 0xD800  # a surrogate, which no text has


class StopMarks:
    """Gives each special token in stop strings a character that no text has.

    Args:
        tokenizer: tokenizer of the model.
        stop: the stop strings.
        hidden_ids: the special tokens that the text leaves out.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Iterable[str], hidden_ids: frozenset[int]
    ) -> None:
        texts = {text: id_ for text, id_ in tokenizer.added_tokens.items() if id_ in hidden_ids}
        found = [text for text in texts if any(text in word for word in stop)]
        marks = {text: chr(_FIRST_MARK + number) for number, text in enumerate(found)}
        longest_first = sorted(map(re.escape, found), key=len, reverse=True)
        pattern = re.compile("|".join(longest_first) or r"(?!)")
        self._by_id = {texts[text]: mark for text, mark in marks.items()}
        self._originals = {pattern.sub(lambda match: marks[match[0]], word): word for word in stop}
        self._drop = dict.fromkeys(map(ord, marks.values()))

    @property
    def stop(self) -> list[str]:
        """The stop strings, with marks for special tokens."""
        return list(self._originals)

    def of(self, token_id: int) -> str:
        """Return the mark of a token; empty for any other token."""
        return self._by_id.get(token_id, "")

    def original(self, word: str) -> str:
        """Return the stop string of one with marks."""
        return self._originals.get(word, word)

    def without(self, text: str) -> str:
        """Return text without marks."""
        return text.translate(self._drop) if self._drop else text
