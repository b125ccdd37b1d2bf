"""Reads calls with arguments in Python's or Gemma's notation; nothing is executed."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable

from paged_backend.parsers.literals import PYTHON, SPACE, LiteralReader, gemma
from paged_backend.parsers.output import Output
from paged_backend.parsers.schema_values import ParameterTypes, as_json
from paged_backend.parsers.source import Reading, UnreadText

NAME = re.compile(r"[\w.-]*")
_KEYWORD = re.compile(r"\w*")


def read_python_calls(source: UnreadText, output: Output, end: str) -> Reading[None]:
    """Read a list of calls with keyword arguments.

    Args:
        source: the answer.
        output: takes the calls.
        end: a mark that may come after the list.

    Raises:
        NotACallError: a part of the text is not a call.
    """
    source.begin_head()
    yield from source.run(SPACE)
    yield from source.expect("[")
    yield from _python_call(source, output)
    while not (yield from _take(source, "]")):
        source.begin_head()
        yield from source.expect(",")
        if (yield from _take(source, "]")):
            source.accept_head()
            break
        yield from _python_call(source, output)
    yield from source.run(SPACE)
    if end:
        yield from source.take(end)
    yield from source.run(SPACE)


def _python_call(source: UnreadText, output: Output) -> Reading[None]:
    """Read a call that begins within the source's head."""
    yield from source.run(SPACE)
    name = yield from source.run(NAME)
    yield from source.run(SPACE)
    yield from source.expect("(")
    if not name:
        source.refuse()
    if (yield from _take(source, ")")):
        source.accept_head()
        output.whole_call(name, "{}")
        return
    keyword = yield from _keyword(source)
    output.call(name)
    output.arguments(f'{{"{keyword}": ')
    literals = LiteralReader(source, output.arguments, PYTHON)
    while True:
        yield from literals.value()
        has_comma = yield from _take(source, ",")
        if (yield from _take(source, ")")):
            break
        if not has_comma:
            source.refuse()
        source.begin_head()
        keyword = yield from _keyword(source)
        output.arguments(f', "{keyword}": ')
    output.arguments("}")
    output.end_call()


def _keyword(source: UnreadText) -> Reading[str]:
    yield from source.run(SPACE)
    keyword = yield from source.run(_KEYWORD)
    yield from source.run(SPACE)
    yield from source.expect("=")
    if not keyword:
        source.refuse()
    source.accept_head()
    return keyword


def _take(source: UnreadText, literal: str) -> Reading[bool]:
    """Take white space, and a literal if it is next."""
    yield from source.run(SPACE)
    return (yield from source.take(literal))


def read_gemma_call(
    source: UnreadText, output: Output, types: ParameterTypes, quote: str
) -> Reading[None]:
    """Read a call: ``call:``, a name and an object.

    Args:
        source: the answer.
        output: takes the call.
        types: types of the tools' parameters, to which strings are converted.
        quote: text before and after strings.

    Raises:
        NotACallError: this is not a call.
    """
    source.begin_head()
    yield from source.expect("call:")
    name = yield from source.run(NAME)
    if not name or (yield from source.peek()) != "{":
        source.refuse()
    source.accept_head()
    output.call(name)

    def convert(key: str) -> Callable[[str], str] | None:
        wanted = types.of(name, json.loads(f'"{key}"'))
        return None if set(wanted) <= {"string"} else functools.partial(as_json, types=wanted)

    yield from LiteralReader(source, output.arguments, gemma(quote), convert).value()
    output.end_call()
