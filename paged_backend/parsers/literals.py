"""Translates values in Python's and Gemma's notation to JSON while they arrive."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.parsers.source import Reading, UnreadText

MAX_DEPTH = 200  # lists and objects within each other; Python reads no more, either

SPACE = re.compile(r"\s*")
_TOKEN = re.compile(r"[\w.+-]*")
_BARE_KEY = re.compile(r"[\w$.-]*")
_CLOSERS = {"[": "]", "{": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_PYTHON_ESCAPES = dict(zip("\\'\"abfnrtv\n", ("\\", "'", '"', *"\a\b\f\n\r\t\v", ""), strict=True))
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_JSON_ESCAPES = frozenset('"\\/bfnrt')

Put = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written.

    Attributes:
        quotes: texts around strings; the longest first, if one begins another.
        raw_quotes: the members of ``quotes`` within which a backslash is an ordinary character.
        read_escape: reads what follows a backslash in other strings.
        has_bare_keys: keys of objects need no quotes.
        joins_strings: strings that follow each other are one.
    """

    quotes: tuple[str, ...]
    raw_quotes: tuple[str, ...]
    read_escape: Callable[[UnreadText, Put], Reading[None]]
    has_bare_keys: bool = False
    joins_strings: bool = False


class LiteralReader:
    """Reads values.

    Args:
        source: the answer.
        put: takes the JSON.
        notation: notation of the values.
        convert: returns the JSON of a string that is a member of the outermost object, by its key
            and its text.
    """

    def __init__(
        self,
        source: UnreadText,
        put: Put,
        notation: Notation,
        convert: Callable[[str], Callable[[str], str] | None] = lambda key: None,
    ) -> None:
        self._source = source
        self._put = put
        self._notation = notation
        self._convert = convert

    def value(self) -> Reading[None]:
        """Read a value. Containers are on a list, so that the work does not depend on their depth.

        Raises:
            NotACallError: something else is next, or the answer ends within the value.
        """
        source, closers, key = self._source, list[str](), ""
        while True:
            yield from source.run(SPACE)
            character = yield from source.peek()
            is_opened = character in _CLOSERS
            if is_opened:
                source.skip(1)
                self._put(character)
                closers.append(_CLOSERS[character])
            else:
                yield from self._scalar(key if len(closers) == 1 else "")
            while closers and not (yield from self._follows(closers, is_first=is_opened)):
                is_opened = False
            if not closers:
                return
            key = (yield from self.key()) if closers[-1] == "}" else ""

    def _follows(self, closers: list[str], *, is_first: bool) -> Reading[bool]:
        """Return True if another value follows in a container; otherwise close it."""
        source = self._source
        if len(closers) > MAX_DEPTH:
            source.refuse()
        yield from source.run(SPACE)
        has_comma = not is_first and (yield from source.take(","))
        yield from source.run(SPACE)
        if (yield from source.take(closers[-1])):
            self._put(closers.pop())
            return False
        if not (is_first or has_comma):
            source.refuse()
        if has_comma:
            self._put(", ")
        return True

    def key(self) -> Reading[str]:
        """Read a key with its colon, and return it."""
        source, parts = self._source, list[str]()
        source.begin_head()
        yield from source.run(SPACE)
        if not (yield from self._string(parts.append)):
            if not self._notation.has_bare_keys:
                source.refuse()
            parts.append((yield from source.run(_BARE_KEY)))
        yield from source.run(SPACE)
        yield from source.expect(":")
        source.accept_head()
        text = "".join(parts)
        self._put(f'"{text}": ')
        return text

    def _scalar(self, key: str) -> Reading[None]:
        convert = self._convert(key) if key else None
        if convert is None:
            is_string = yield from self._string(self._put, '"')
        else:
            parts: list[str] = []
            is_string = yield from self._string(parts.append)
            if is_string:
                self._put(convert(json.loads(f'"{"".join(parts)}"')))
        if not is_string:
            yield from self._word()

    def _string(self, put: Put, quote: str = "") -> Reading[bool]:
        """Read a string, if one is next.

        Args:
            put: takes its characters as in JSON.
            quote: is put before and after them.
        """
        mark = yield from self._quote()
        if not mark:
            return False
        put(quote)
        while mark:
            yield from self._characters(mark, put)
            mark = ""
            if self._notation.joins_strings:
                yield from self._source.run(SPACE)
                mark = yield from self._quote()
        put(quote)
        return True

    def _quote(self) -> Reading[str]:
        """Take a quote, if one is next, and return it."""
        for mark in self._notation.quotes:
            if (yield from self._source.take(mark)):
                return mark
        return ""

    def _characters(self, mark: str, put: Put) -> Reading[None]:
        source, notation = self._source, self._notation
        ends = (mark,) if mark in notation.raw_quotes else (mark, "\\")
        while (found := (yield from source.until(ends, lambda text: put(escaped(text))))) != mark:
            if not found:
                source.refuse()
            yield from notation.read_escape(source, put)

    def _word(self) -> Reading[None]:
        source = self._source
        source.begin_head()
        word = yield from source.run(_TOKEN)
        if not word or not (yield from source.peek()):
            source.refuse()  # at the end, a number may be incomplete
        source.accept_head()
        self._put(_WORDS.get(word) or _number(source, word))


def _number(source: UnreadText, word: str) -> str:
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        source.refuse()
    if not math.isfinite(number):
        source.refuse()
    return json.dumps(number)


def escaped(text: str) -> str:
    """Return text as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _python_escape(source: UnreadText, put: Put) -> Reading[None]:
    character = yield from source.peek()
    if character in _PYTHON_ESCAPES:
        source.skip(1)
        put(escaped(_PYTHON_ESCAPES[character]))
    elif character in _HEX_LENGTHS:
        source.skip(1)
        yield from _put_code(source, put, _HEX_LENGTHS[character], 16)
    elif character in _OCTAL:
        yield from _put_code(source, put, 3, 8)
    else:  # as in Python, the backslash is one of the string's characters
        put(escaped("\\"))


def _json_escape(source: UnreadText, put: Put) -> Reading[None]:
    character = yield from source.peek()
    source.skip(len(character))
    if character == "u":
        yield from _put_code(source, put, 4, 16)
    elif character in _JSON_ESCAPES:
        put(f"\\{character}")
    else:
        source.refuse()


def _put_code(source: UnreadText, put: Put, length: int, base: int) -> Reading[None]:
    """Read the number of a character: ``length`` digits, or at most that many octal ones."""
    digits = ""
    while len(digits) < length:
        character = yield from source.peek()
        if not character or character not in _DIGITS[:base] + _DIGITS[:base].upper():
            break
        source.skip(1)
        digits += character
    if not digits or (base == 16 and len(digits) < length) or int(digits, base) > sys.maxunicode:
        source.refuse()
    code = int(digits, base)
    # A surrogate is not a character, but JSON can name it.
    put(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else escaped(chr(code)))


_DIGITS = "0123456789abcdef"
_OCTAL = frozenset(_DIGITS[:8])
PYTHON = Notation(('"""', "'''", '"', "'"), (), _python_escape, joins_strings=True)


def gemma(quote: str) -> Notation:
    """Return Gemma's notation with its quote for strings."""
    return Notation((quote, '"'), (quote,), _json_escape, has_bare_keys=True)
