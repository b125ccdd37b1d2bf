"""Reads the text of tool calls, while it arrives where the format allows that."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from paged_backend.parsers.formats import CallSyntax, JsonCalls, NamedCalls, PythonicCalls

MAX_HEAD_LENGTH = 4096  # characters before the arguments; more is read only as a whole
MAX_PYTHON_LENGTH = 2**20  # characters

_READING = json.JSONDecoder()


class CallPart(NamedTuple):
    """A part of a call; the first one has the name."""

    name: str | None
    arguments: str


class CallError(ValueError):
    """Text that is no call; the message is the text."""


class CallReader(Protocol):
    """Reads one region of calls."""

    @property
    def is_inside(self) -> bool:
        """True within JSON arguments, whose end depends on nothing but themselves."""

    def take(self, text: str) -> int:
        """Add text within arguments, instead of ``feed``.

        Returns:
            The number of characters at the beginning that belong to the arguments.
        """

    def feed(self, text: str) -> Iterator[CallPart]:
        """Add text of the region, and yield what is certain."""

    def close(self, value: Any) -> Iterator[CallPart]:
        """End the region, and yield the rest.

        Args:
            value: the region's value as transformers' parser reads it.

        Raises:
            CallError: the rest is no call.
        """


class JsonReader:
    """Reads objects with a name and arguments; several may follow each other or form a list."""

    def __init__(self) -> None:
        self._text = ""
        self._arguments: JsonValue | None = None

    @property
    def is_inside(self) -> bool:
        """True within the arguments of a call."""
        return self._arguments is not None

    def take(self, text: str) -> int:
        """Add text within arguments; returns how much of it belongs to them."""
        assert self._arguments is not None
        length = self._arguments.feed(text)
        if self._arguments.is_complete:
            self._arguments = None
        return length

    def feed(self, text: str) -> Iterator[CallPart]:
        """Yield the name once it is complete, and then the arguments as they arrive."""
        self._text += text
        while head := _JSON_HEAD.match(self._text[:MAX_HEAD_LENGTH]):
            yield CallPart(json.loads(head["name"]), "")
            self._text = self._text[head.end() :]
            self._arguments = JsonValue()
            length = self.take(self._text)
            yield CallPart(None, self._text[:length])
            self._text = self._text[length:]

    def close(self, value: Any) -> Iterator[CallPart]:
        """Yield the calls whose arguments come before their name, or that have none."""
        if self._arguments is not None:  # the answer ended within them
            return
        rest = self._text
        while rest := rest.lstrip(_BETWEEN):
            try:
                call, end = _READING.raw_decode(rest)
                yield from _whole(str(call["name"]), self._arguments_of(call))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise CallError(rest) from None
            rest = rest[end:]

    def _arguments_of(self, call: Mapping[str, Any]) -> Any:
        return next((call[key] for key in _ARGUMENTS_KEYS if key in call), {})


class NamedReader:
    """Reads a name, and then the arguments as a JSON object."""

    def __init__(self, head: str) -> None:
        self._head = re.compile(head)
        self._text = ""
        self._arguments: JsonValue | None = None
        self._has_arguments = False

    @property
    def is_inside(self) -> bool:
        """True within the arguments of the call."""
        arguments = self._arguments
        return arguments is not None and self._has_arguments and not arguments.is_complete

    def take(self, text: str) -> int:
        """Add text within the arguments; returns how much of it belongs to them."""
        assert self._arguments is not None
        length = self._arguments.feed(text)
        self._has_arguments |= length > 0
        return length

    def feed(self, text: str) -> Iterator[CallPart]:
        """Yield the name once it is complete, and then the arguments as they arrive."""
        self._text += text
        if self._arguments is None:
            head = self._head.match(self._text[:MAX_HEAD_LENGTH])
            if head is None:
                return
            yield CallPart(head["name"], "")
            self._text = self._text[head.end() :]
            self._arguments = JsonValue()
        self._text = self._text.lstrip()
        if self._text and not self._arguments.is_complete:
            yield CallPart(None, self._text[: self.take(self._text)])
            self._text = ""

    def close(self, value: Any) -> Iterator[CallPart]:
        """Yield empty arguments if there are none."""
        if self._arguments is None:
            raise CallError(self._text)
        if not self._has_arguments:
            yield CallPart(None, "{}")


class _WholeReader:
    """Base of readers that translate a region as a whole, when it closes."""

    is_inside = False

    def take(self, text: str) -> int:
        """Return 0, because no text is within JSON arguments."""
        return 0

    def feed(self, text: str) -> Iterator[CallPart]:
        """Yield nothing."""
        return iter(())


class PythonReader(_WholeReader):
    """Reads a list of Python calls; nothing is executed."""

    def close(self, value: Any) -> Iterator[CallPart]:
        """Yield all calls."""
        text = str(value).strip().removesuffix("<|python_end|>")
        try:
            calls = [_python_call(node) for node in _python_list(text)]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            raise CallError(text) from None
        for name, arguments in calls:
            yield from _whole(name, arguments)


class ValueReader(_WholeReader):
    """Takes calls as transformers' parser reads them."""

    def close(self, value: Any) -> Iterator[CallPart]:
        """Yield all calls."""
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, Mapping) else {}
            name = function.get("name")
            if not isinstance(name, str):
                raise CallError(str(value))
            yield from _whole(name, function.get("arguments", {}))


class JsonValue:
    """Finds the end of a JSON object or array that arrives in chunks."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """Return the number of characters at the beginning that belong to the value."""
        if self.is_complete:
            return 0
        for position, character in enumerate(text, 1):
            self._read(character)
            if self.is_complete:
                return position
        return len(text)

    def _read(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0


def call_reader(syntax: CallSyntax | None) -> CallReader:
    """Return a reader for a region; without a syntax, for transformers' values."""
    match syntax:
        case JsonCalls():
            return JsonReader()
        case NamedCalls(_, head):
            return NamedReader(head)
        case PythonicCalls():
            return PythonReader()
        case _:
            return ValueReader()


_BETWEEN = " \t\r\n;,[]}"  # between the arguments of a call and the next call
_ARGUMENTS_KEYS = ("arguments", "parameters")
_JSON_HEAD = re.compile(
    r'[\s;,\[\]}]*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)


def _whole(name: str, arguments: Any) -> Iterator[CallPart]:
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    yield CallPart(name, "")
    yield CallPart(None, arguments)


def _python_list(text: str) -> list[ast.expr]:
    if len(text) > MAX_PYTHON_LENGTH:
        raise ValueError
    parsed = ast.parse(text, mode="eval").body
    if not isinstance(parsed, ast.List):
        raise ValueError
    return parsed.elts


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    json.dumps(arguments, allow_nan=False)
    return ast.unparse(node.func), arguments
