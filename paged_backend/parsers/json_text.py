"""Reads JSON that arrives in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from paged_backend.parsers.source import MAX_HEAD_LENGTH, NotACallError, Reading, UnreadText

_OUTSIDE = re.compile(r'[^"{}\[\]]*')  # text outside of strings
_STRICTLY_OUTSIDE = re.compile(r"[\s\w.,:+-]*")
_STRUCTURE = '"\\{}[]'
_INSIDE = re.compile(r'[^"\\]*')
ARGUMENTS_KEYS = ("arguments", "parameters")
TYPE_OF_CALL = ('"type"', ":", '"function"')  # may be before the name


class JsonEnd:
    """Finds the end of a JSON object or array.

    Args:
        is_strict: stop at characters that JSON has only in strings.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self._outside = _STRICTLY_OUTSIDE if is_strict else _OUTSIDE
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_complete = False

    def add(self, text: str, position: int) -> int:
        """Add the text from ``position`` on; returns the position after the value's part of it."""
        while position < len(text) and not self.is_complete:
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            plain = (_INSIDE if self._in_string else self._outside).match(text, position)
            assert plain is not None
            position = plain.end()
            if position < len(text):
                if text[position] not in _STRUCTURE:
                    break
                self._read(text[position])
                position += 1
        return position

    def _read(self, character: str) -> None:
        match character:
            case "\\":
                self._escaped = True
            case '"':
                self._in_string = not self._in_string
            case "{" | "[":
                self._depth += 1
            case _:
                self._depth -= 1
                self.is_complete = self._depth <= 0


def read_string(source: UnreadText) -> Reading[str]:
    """Take a JSON string that is part of a head, and return its text.

    Raises:
        NotACallError: something else is next.
    """
    parts: list[str] = []
    yield from source.expect('"')
    while (mark := (yield from source.until(('"', "\\"), parts.append))) == "\\":
        escaped = yield from source.peek()
        source.skip(len(escaped))
        parts += (mark, escaped)
    if not mark:
        source.refuse()
    try:
        return str(json.loads(f'"{"".join(parts)}"', strict=False))
    except ValueError:
        source.refuse()


def read_value(
    source: UnreadText, put: Callable[[str], object], *, is_strict: bool = False
) -> Reading[bool]:
    """Take an object or array that is next.

    Args:
        source: the answer.
        put: takes its text as it arrives; if that is false, nothing more is taken.
        is_strict: stop at characters that JSON has only in strings.

    Returns:
        False if the value is not complete.
    """
    end = JsonEnd(is_strict=is_strict)
    while not end.is_complete:
        text = yield from source.scan(end.add)
        if not text or put(text) is False:
            return False
    return True


def read_object_call(
    source: UnreadText, is_tool: Callable[[str], bool]
) -> Reading[tuple[str, str] | None]:
    """Take a call with its arguments before its name, or without a name.

    Its arguments may have any length. An object without arguments is not a long call, so that no
    more than ``MAX_HEAD_LENGTH`` characters of it are kept back.

    Args:
        source: the answer; an object is next.
        is_tool: returns True for the name of a tool. An answer in JSON may have a name, too, so
            that an object without arguments is a call only of a tool that exists.

    Returns:
        The name and the arguments as JSON; None if this is not a call; its text then comes next in
        the source.

    Raises:
        NotACallError: this is not a call, and it is too long to be read again.
    """
    parts: list[str] = []
    length = 0
    is_call = False

    def put(text: str) -> bool:
        nonlocal length, is_call
        parts.append(text)
        length += len(text)
        if length > MAX_HEAD_LENGTH and not is_call:
            is_call = _has_arguments("".join(parts)[:MAX_HEAD_LENGTH])
            return is_call
        return True

    is_complete = yield from read_value(source, put, is_strict=True)
    text = "".join(parts)
    call = _object_call(text, is_tool) if is_complete else None
    if call is None and not source.is_cut:
        if len(text) > MAX_HEAD_LENGTH:
            raise NotACallError(text)
        source.unread(text)
    return call


def _has_arguments(text: str) -> bool:
    return any(f'"{key}"' in text for key in ARGUMENTS_KEYS)


def _object_call(text: str, is_tool: Callable[[str], bool]) -> tuple[str, str] | None:
    try:
        call = json.loads(text)
        name = call["name"]
        found = next((key for key in ARGUMENTS_KEYS if key in call), None)
        if not isinstance(name, str) or (found is None and not is_tool(name)):
            return None
        arguments = {} if found is None else call[found]
        if isinstance(arguments, str):
            return name, arguments
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
