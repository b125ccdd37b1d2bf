"""The items of the input of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from paged_client.gateway.items import (
    OpenObject,
    json_text,
    known_type,
    tag_of,
    text_or_list,
    with_reasoning,
)
from paged_client.gateway.schema.chat_messages import MAX_MESSAGES, MAX_PARTS

# Items of Codex and of built-in tools that say nothing to the model.
SKIPPED_ITEMS = ("ghost_snapshot", "web_search_call", "image_generation_call", "additional_tools")


class ResponsesText(OpenObject):
    """A part of a message, of a function's output or of reasoning."""

    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_Part = Annotated[ResponsesText, BeforeValidator(known_type(*_TEXTS))]
Text: TypeAlias = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[_Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("(list)")],
    Discriminator(text_or_list),
]


class MessageItem(OpenObject):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Text | None = None


class FunctionCall(OpenObject):
    """A call in the history."""

    call_id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=128)
    # Incomplete JSON if the call was cut; the engine reads it.
    arguments: Annotated[str, BeforeValidator(json_text)] = ""


class FunctionCallOutput(OpenObject):
    """The result of a call."""

    call_id: str = Field(max_length=256)
    output: Text = ""


class ReasoningItem(OpenObject):
    """Reasoning in the history; encrypted content is not read."""

    text: str = ""


class SkippedItem(OpenObject):
    """An item that the model does not see."""


_SKIPPED = SKIPPED_ITEMS[0]
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _item_tag(value: Any) -> str:
    tag = tag_of("message")(value)
    return f"({_SKIPPED})" if tag[1:-1] in SKIPPED_ITEMS else tag


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[FunctionCall, Tag("(function_call)")]
    | Annotated[FunctionCallOutput, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, BeforeValidator(with_reasoning("text")), Tag("(reasoning)")]
    | Annotated[SkippedItem, Tag(f"({_SKIPPED})")],
    Discriminator(_item_tag),
    BeforeValidator(known_type(*_ITEMS, *SKIPPED_ITEMS, default="message")),
]
Input: TypeAlias = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("(list)")],
    Discriminator(text_or_list),
]
