"""Converts the input of a response to chat messages."""

from __future__ import annotations

import json

from paged_client.gateway.conversation import Conversation
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json
from paged_client.gateway.responses_api.items import (
    FunctionCall,
    FunctionCallOutput,
    Input,
    Item,
    MessageItem,
    ReasoningItem,
    Text,
    TextPart,
)


def messages_of(instructions: str | None, items: Input) -> list[Json]:
    """Return chat messages in the engine's format.

    Raises:
        ApiError: an item cannot be a part of a conversation.
    """
    conversation = Conversation()
    if instructions:
        conversation.system(instructions)
    if isinstance(items, str):
        conversation.user(items)
    else:
        for index, item in enumerate(items):
            _add(conversation, f"input[{index}]", item)
    if not conversation.messages:
        raise ApiError.field("input", "is empty")
    return conversation.messages


def _add(conversation: Conversation, field: str, item: Item) -> None:
    match item:
        case MessageItem():
            _add_message(conversation, item)
        case ReasoningItem():
            texts = item.content or item.summary
            if texts:
                conversation.reasoning(_joined(texts))
        case FunctionCall():
            _check_arguments(f"{field}.arguments", item.arguments)
            conversation.call(item.call_id, item.name, item.arguments)
        case FunctionCallOutput():
            conversation.result(f"{field}.call_id", item.call_id, _text(item.output))


def _add_message(conversation: Conversation, item: MessageItem) -> None:
    text = _text(item.content)
    match item.role:
        case "user":
            conversation.user(text)
        case "assistant":
            conversation.assistant(text)
        case _:  # chat templates know no developers
            conversation.system(text)


def _text(content: Text) -> str:
    return content if isinstance(content, str) else _joined(content)


def _joined(parts: list[TextPart]) -> str:
    return "\n".join(part.text for part in parts)


def _check_arguments(field: str, arguments: str) -> None:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError.field(field, "must be a JSON object")
