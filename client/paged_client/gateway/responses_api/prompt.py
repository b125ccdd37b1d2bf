"""Converts the input of a response to chat messages."""

from __future__ import annotations

from paged_client.gateway.conversation import ConversationBuilder
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
)


def messages_of(instructions: str | None, items: Input) -> list[Json]:
    """Return chat messages in the engine's format.

    Raises:
        ApiError: an item cannot be a part of a conversation.
    """
    conversation = ConversationBuilder()
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


def _add(conversation: ConversationBuilder, field: str, item: Item) -> None:
    match item:
        case MessageItem():
            _add_message(conversation, field, item)
        case ReasoningItem():
            if item.text:
                conversation.reasoning(item.text)
        case FunctionCall():
            conversation.call(item.call_id, item.name, item.arguments)
        case FunctionCallOutput():
            conversation.result(item.call_id, _text(item.output))


def _add_message(conversation: ConversationBuilder, field: str, item: MessageItem) -> None:
    if item.content is None:
        if item.role == "assistant":
            return  # it was cut before its first word
        raise ApiError.field(f"{field}.content", "is missing")
    text = _text(item.content)
    match item.role:
        case "user":
            conversation.user(text)
        case "assistant":
            conversation.assistant(text)
        case _:  # chat templates know no developers
            conversation.system(text)


def _text(content: Text) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
