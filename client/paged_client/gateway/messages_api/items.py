"""The messages of ``/v1/messages`` and their content blocks."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag

from paged_client.gateway.items import (
    OpenObject,
    json_text,
    known_type,
    tag_of,
    text_or_list,
    with_reasoning,
)
from paged_client.gateway.schema.chat_messages import MAX_MESSAGES, MAX_PARTS


class TextBlock(OpenObject):
    """A text."""

    text: str


_Text = Annotated[TextBlock, BeforeValidator(known_type("text"))]
Texts: TypeAlias = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[_Text], Field(max_length=MAX_PARTS, fail_fast=True), Tag("(list)")],
    Discriminator(text_or_list),
]


class ThinkingBlock(OpenObject):
    """Reasoning in the history; signatures are not checked."""

    thinking: str


class RedactedThinkingBlock(OpenObject):
    """Encrypted reasoning, which is not read."""


class ToolUseBlock(OpenObject):
    """A call in the history."""

    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=128)
    # An object; the text of one that was cut, if a client collected it from a stream.
    input: Annotated[str, BeforeValidator(json_text)] = ""


class ToolResultBlock(OpenObject):
    """The result of a call."""

    tool_use_id: str = Field(max_length=256)
    content: Texts = ""


_READ_THINKING = BeforeValidator(with_reasoning("thinking"))
_TYPES = ("text", "thinking", "reasoning", "redacted_thinking", "tool_use", "tool_result")
Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ThinkingBlock, _READ_THINKING, Tag("(thinking)")]
    | Annotated[ThinkingBlock, _READ_THINKING, Tag("(reasoning)")]
    | Annotated[RedactedThinkingBlock, Tag("(redacted_thinking)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")],
    Discriminator(tag_of()),
    BeforeValidator(known_type(*_TYPES)),
]
Content: TypeAlias = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag("(list)")],
    Discriminator(text_or_list),
]


class MessagesTurn(OpenObject):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content | None = None


Messages: TypeAlias = Annotated[
    list[MessagesTurn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]
