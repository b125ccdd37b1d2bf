"""The arguments of the calls in a history, as chat templates take them.

Most templates take them as objects, some as text. Arguments that are no object, such as those that
``max_tokens`` cut, appear in the prompt as the model wrote them: a template gets a mark in their
place, which becomes their text when the prompt is complete. This runs in the sandbox process.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from paged_backend.text.messages import Message
from paged_backend.text.partial_json import completed

Render = Callable[[list[Message]], str]
Fill = Callable[[Message], Message]
Attempt = tuple[list[Message], bool]
"""Messages with their arguments in one form, and whether a mark has to be in their prompt."""


class ArgumentMarks:
    """Texts that stand for arguments while a prompt is rendered; no client can guess them.

    A mark has a quotation mark, so that a mark that became JSON, with quotation marks around it,
    can be told from one that the template put between quotation marks.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._key = secrets.token_hex(16)
        self._pattern = re.compile(rf'"\[{self._key}\\"(\d+)\]"|\[{self._key}"(\d+)\]')

    def add(self, text: str) -> str:
        """Return the mark of a new text."""
        self._texts.append(text)
        return f'[{self._key}"{len(self._texts) - 1}]'

    def are_in(self, prompt: str) -> bool:
        """Return True if a prompt has a mark."""
        return self._key in prompt

    def replace(self, prompt: str) -> str:
        """Return a prompt with the texts in place of their marks."""
        if not self._texts:
            return prompt
        return self._pattern.sub(lambda match: self._texts[int(match[1] or match[2])], prompt)


def render_history(
    messages: list[Message],
    render: Render,
    fill: Fill,
    *,
    text_first: bool = False,
) -> str:
    """Return the prompt of messages, rendered with the first form of arguments that succeeds.

    Args:
        messages: messages of a conversation; see :func:`paged_backend.text.messages.read_messages`.
        render: renders messages.
        fill: gives content to a message without any, for templates that cannot do without.
        text_first: whether arguments are tried as text first, not as objects.

    Raises:
        Exception: what ``render`` raised for the form that was tried first.
    """
    marks = ArgumentMarks()
    failure: Exception | None = None
    incomplete: str | None = None
    for attempt, needs_marks in _attempts(messages, marks, fill, text_first=text_first):
        try:
            prompt = render(attempt)
        except MemoryError:
            raise
        except Exception as error:  # templates may raise any exception
            failure = failure or error
            continue
        if not needs_marks or marks.are_in(prompt):
            return marks.replace(prompt)
        incomplete = incomplete or prompt
    if incomplete is not None:  # the template leaves the calls out
        return incomplete
    assert failure is not None
    raise failure


def _attempts(
    messages: list[Message], marks: ArgumentMarks, fill: Fill, *, text_first: bool
) -> Iterator[Attempt]:
    arguments = [call["function"]["arguments"] for call in _calls(messages)]
    is_cut = any(_object(value) is None for value in arguments)
    has_all = all("content" in message for message in messages)
    filled = list(map(fill, messages))
    forms = [_object_or_mark, _text] if arguments else [_object_or_mark]
    for form in reversed(forms) if text_first else forms:
        yield _with_arguments(messages, partial(form, marks)), is_cut
        if not has_all:  # some templates add to the content even if there is none
            yield _with_arguments(filled, partial(form, marks)), is_cut
    if is_cut:  # for a template that takes nothing but objects
        yield _with_arguments(filled, _completed_object), False


def _calls(messages: list[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield from message.get("tool_calls", ())


def _with_arguments(
    messages: list[Message], change: Callable[[str | dict[str, Any]], object]
) -> list[Message]:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**message, "tool_calls": list(map(changed, message["tool_calls"]))}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _object(arguments: str | dict[str, Any]) -> dict[str, Any] | None:
    """Return arguments as an object; None if they are none. Blank ones and null are empty."""
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def _object_or_mark(marks: ArgumentMarks, arguments: str | dict[str, Any]) -> dict[str, Any] | str:
    value = _object(arguments)
    return marks.add(str(arguments)) if value is None else value


def _text(marks: ArgumentMarks, arguments: str | dict[str, Any]) -> str:
    value = _object(arguments)
    if value is None:
        return marks.add(str(arguments))
    if isinstance(arguments, str) and value:
        return arguments
    return json.dumps(value, ensure_ascii=False)


def _completed_object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return arguments as an object, cut ones with the values that they have."""
    value = _object(arguments)
    if value is None:
        value = completed(str(arguments))
    return {"arguments": arguments} if value is None else value
