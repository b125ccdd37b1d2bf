"""Completes a JSON object that lacks its end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_CLOSERS = {"{": "}", "[": "]"}
# A string, possibly without its end, or a character that opens, closes or separates values.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)|[{}\[\],]', re.DOTALL)
MAX_LENGTH = 2**16  # characters; completing takes milliseconds
_LONGEST_ESCAPE = 12  # characters of an escaped surrogate pair


def completed(text: str) -> dict[str, Any] | None:
    """Return the values of an object that was cut; None if the text does not begin one.

    A text of more than ``MAX_LENGTH`` characters is not completed either.

    The last value is kept if it is complete, or a string, which then ends where it was cut.
    """
    for attempt in _attempts(text) if len(text) <= MAX_LENGTH else ():
        try:
            value = json.loads(attempt)
            json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None


class _End(NamedTuple):
    """How a text ends."""

    closers: str  # what closes the arrays and objects that are open
    is_in_string: bool
    complete: int  # characters before which every value is complete


def _attempts(text: str) -> Iterator[str]:
    """Yield complete texts, the one that keeps most first."""
    end = _end_of(text)
    if end is None:
        return
    if end.is_in_string:
        for length in range(_LONGEST_ESCAPE):  # the text may end inside an escape
            yield f'{text[: len(text) - length]}"{end.closers}'
    yield text + end.closers
    before = text[: end.complete]
    end = _end_of(before)
    if end is not None:
        yield before + end.closers


def _end_of(text: str) -> _End | None:
    """Return how a text ends; None if it closes what it has not opened."""
    closers: list[str] = []
    is_in_string, complete = False, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _CLOSERS:
            closers.append(_CLOSERS[token])
            complete = match.end()
        elif token in _CLOSERS.values():
            if not closers or closers.pop() != token:
                return None
        elif token == ",":
            complete = match.start()
        else:
            is_in_string = match[1] != '"'
    return _End("".join(reversed(closers)), is_in_string, complete)
