"""Converts the messages of ``/v1/messages`` to chat messages."""

from __future__ import annotations

from collections.abc import Sequence

from paged_client.gateway.conversation import ConversationBuilder
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json
from paged_client.gateway.messages_api.items import (
    Block,
    Content,
    MessagesTurn,
    RedactedThinkingBlock,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

# Claude Code puts a line with this beginning before its instructions. It says nothing to the model,
# and it is different for each request, so that no prompt would have a cached prefix.
BILLING_HEADER = "x-anthropic-billing-header:"


def chat_of(system: Texts, messages: Sequence[MessagesTurn]) -> Json:
    """Return chat messages, with rendering options if the answer continues the last of them.

    Raises:
        ApiError: a block cannot be a part of its message.
    """
    conversation = ConversationBuilder()
    instructions = "\n\n".join(text for text in _texts(system) if _is_for_model(text))
    if instructions:
        conversation.system(instructions)
    for index, message in enumerate(messages):
        _add(conversation, f"messages[{index}]", message)
    chat: Json = {"messages": conversation.messages}
    if messages[-1].role == "assistant" and conversation.is_open:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat


def _add(conversation: ConversationBuilder, field: str, message: MessagesTurn) -> None:
    if message.content is None:
        if message.role != "assistant":
            raise ApiError.field(f"{field}.content", "is missing")
    elif message.role == "system":
        conversation.system("\n".join(_plain_texts(field, message.content)))
    elif message.role == "user":
        _add_user(conversation, field, message.content)
    elif isinstance(message.content, str):
        conversation.assistant(message.content)
    else:
        for index, block in enumerate(message.content):
            _add_assistant(conversation, f"{field}.content[{index}]", block)


def _add_user(conversation: ConversationBuilder, field: str, content: Content) -> None:
    """Add the results of tools, each as a message, and the texts between them."""
    texts: list[str] = []
    for index, block in enumerate([content] if isinstance(content, str) else content):
        name = f"{field}.content[{index}]"
        if isinstance(block, str):
            texts.append(block)
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            _say(conversation, texts)
            result = "\n".join(_texts(block.content))
            conversation.result(block.tool_use_id, result)
        else:
            raise _misplaced(name, "user")
    _say(conversation, texts)


def _say(conversation: ConversationBuilder, texts: list[str]) -> None:
    if texts:
        conversation.user("\n".join(texts))
        texts.clear()


def _add_assistant(conversation: ConversationBuilder, field: str, block: Block) -> None:
    match block:
        case TextBlock():
            conversation.assistant(block.text)
        case ThinkingBlock():
            conversation.reasoning(block.thinking)
        case ToolUseBlock():
            conversation.call(block.id, block.name, block.input)
        case ToolResultBlock():
            raise _misplaced(field, "assistant")
        case RedactedThinkingBlock():
            pass


def _plain_texts(field: str, content: Content) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = [block.text for block in content if isinstance(block, TextBlock)]
    if len(texts) < len(content):
        raise ApiError.field(f"{field}.content", "must be texts in a message of the role system")
    return texts


def _texts(content: Texts) -> list[str]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def _is_for_model(text: str) -> bool:
    return bool(text) and not text.startswith(BILLING_HEADER)


def _misplaced(field: str, role: str) -> ApiError:
    return ApiError.field(f"{field}.type", f"cannot be in a message of the role {role}")
