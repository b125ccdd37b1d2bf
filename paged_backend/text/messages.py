"""Reads the messages of a conversation, as clients send them and send them back.

A history is not refused for what a model or another server wrote into it: calls with incomplete
arguments, results without a call, messages of the assistant without content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.validation import shorten

MAX_MESSAGES = 4096
# The types of parts that are text, each with the field that has it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text")
# The fields that may have reasoning; the first that says something counts. They are LangChain's,
# Anthropic's and Mistral's, vLLM's, and OpenAI's.
_REASONING_FIELDS = ("reasoning", "thinking", "text", "content", "summary")
# Messages of these roles may lack content: null, or no field.
_MAY_BE_EMPTY = ("assistant", "tool")

Message: TypeAlias = dict[str, Any]


def read_messages(value: object) -> list[Message]:
    """Check messages and return them without their null fields.

    The content of a message is a string, or a list of parts of the type ``text``. The arguments of
    a call are an object, or the text that the client gave.

    Raises:
        InvalidRequest: naming the field and what it accepts.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages", f"must be an array of messages, got {shorten(value)}")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"at most {MAX_MESSAGES}, got {len(value)}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(name: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(name, f"must be an object, got {shorten(value)}")
    # Drop null fields, as transformers does: many templates print null as "None", but print nothing
    # for a missing field.
    message = {field: content for field, content in value.items() if content is not None}
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f"{name}.role", f"must be a string, got {shorten(message.get('role'))}"
        )
    if "function_call" in message:
        raise InvalidRequest(f"{name}.function_call", "is not supported; use tool_calls")
    _read_content(name, message)
    _read_reasoning(name, message)
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidRequest(f"{name}.tool_calls", f"must be a list, got {shorten(calls)}")
    if calls:  # an empty list has no call, but many templates only ask whether there is a list
        message["tool_calls"] = [
            _call(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(calls)
        ]
    return message


def _read_content(name: str, message: Message) -> None:
    """Read the content of a message; its parts of reasoning become ``reasoning_content``."""
    content, field = message.get("content"), f"{name}.content"
    if content is None:
        if message["role"] not in _MAY_BE_EMPTY and not message.get("tool_calls"):
            raise InvalidRequest(field, "must be a string or a list of parts, got None")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest(field, f"must be a string or a list of parts, got {shorten(content)}")
    parts, reasoning = [], []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if message["role"] == "assistant" and kind in _REASONING_PARTS:
            reasoning.append(_reasoning(f"{field}[{index}]", part))
        elif not _is_null(part, kind):  # as in vLLM
            parts.append(_part(f"{field}[{index}]", part))
    reasoning = [text for text in reasoning if text]
    message["content"] = parts
    if reasoning and "reasoning_content" not in message:
        message.setdefault("reasoning", "\n".join(reasoning))


def _read_reasoning(name: str, message: Message) -> None:
    """Give reasoning under both names that templates read, as in vLLM."""
    given = [field for field in ("reasoning", "reasoning_content") if field in message]
    for field in given:
        if not isinstance(message[field], str):
            raise InvalidRequest(f"{name}.{field}", "must be a string")
    if given:
        message["reasoning"] = message["reasoning_content"] = message[given[0]]


def _is_null(part: object, kind: object) -> bool:
    """Return True for a part with a text that is null, but not for one without a text."""
    if not isinstance(part, dict) or not isinstance(kind, str):
        return False
    field = _TEXT_PARTS.get(kind)
    return field in part and part[field] is None


def _reasoning(name: str, part: Message) -> str:
    """Return the text of a part of reasoning; empty if it says nothing, as if it is encrypted."""
    given = [field for field in _REASONING_FIELDS if field in part]
    if not given:
        raise InvalidRequest(f"{name}.text", "must be a string")
    texts = (_reasoning_text(f"{name}.{field}", part[field]) for field in given)
    return next(filter(None, texts), "")


def _reasoning_text(name: str, value: object) -> str:
    """Return reasoning that is a text, null, or a list of parts with texts."""
    if value is None or isinstance(value, str):
        return value or ""
    pieces = value if isinstance(value, list) else [None]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(name, "must be a string or a list of parts with texts")
    return "\n".join(filter(None, texts))


def _part(name: str, part: object) -> Message:
    """Return a part of the type ``text``, with its other fields."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InvalidRequest(name, f"must be of type {_listed(_TEXT_PARTS)}, got {shorten(kind)}")
    field = _TEXT_PARTS[kind]
    rest = {key: value for key, value in part.items() if key not in ("type", field)}
    return {"type": "text", "text": _string(name, part, field), **rest}


def _string(name: str, part: Message, field: str) -> str:
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}.{field}", "must be a string")
    return text


def _call(name: str, call: object) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(name, "must be an object with a function")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{name}.function.name", "must be a string")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    elif not isinstance(arguments, str | dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
