"""Messages of a chat, and the options that render them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from paged_client.gateway.reasoning_parts import field_problem, reasoning_text
from paged_client.gateway.schema.body import MessageBody, RequestBody, given

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_DOCUMENTS = 1024
MAX_TOOLS = 512
_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text")


class TextPart(MessageBody):
    """A text part of a message, or a part of an earlier answer."""

    not_supported: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("image_url", "input_audio", "file", "video_url", "audio_url")
    )
    type: Literal[
        "text", "input_text", "output_text", "refusal", "thinking", "reasoning", "reasoning_text"
    ]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _check_text(cls, value: Any, read: Callable[[Any], TextPart]) -> TextPart:
        """Take a bare text, too, and a text of null, which says nothing; but not no text at all."""
        if isinstance(value, str):
            value = {"type": "text", "text": value}
        elif isinstance(value, dict) and value.get("type") in _REASONING_PARTS:
            value = _reasoning_part(value["type"], reasoning_text(value))
        part = read(value)
        if part.is_empty and part.field not in value:
            raise field_problem(part.field, "is missing")
        return part

    @property
    def field(self) -> str:
        """The name of the field that has the text."""
        return self.type if self.type in ("refusal", "thinking") else "text"

    @property
    def is_empty(self) -> bool:
        """True if the text is null."""
        return getattr(self, self.field) is None

    def as_json(self) -> dict[str, Any]:
        """Return the part in the engine's format."""
        return {"type": self.type, **given(self, ("text", "refusal", "thinking"))}


def _reasoning_part(kind: str, text: str | None) -> dict[str, Any]:
    """Return a part of reasoning in one form; its text is null if it says nothing."""
    field = "thinking" if kind == "thinking" else "text"
    return {"type": kind, **({} if text is None else {field: text or None})}


def _content_kind(content: Any) -> str:
    return "(parts)" if isinstance(content, list) else "(text)"


Content = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("(parts)")],
    Discriminator(_content_kind),
]


class CalledFunction(MessageBody):
    """The function of a call in the history."""

    name: str = Field(min_length=1, max_length=128)
    # Incomplete JSON if the call was cut; the engine reads it.
    arguments: str | dict[str, Any] = ""


class MessageToolCall(MessageBody):
    """A call in the history."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_json(self) -> dict[str, Any]:
        """Return the call in the engine's format."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**given(self, ("id",)), "type": self.type, "function": function}


class Message(MessageBody):
    """One turn of a conversation."""

    not_supported: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("function_call", "audio")),
        **dict.fromkeys(("images", "videos", "files"), []),
    }
    role: str = Field(min_length=1, max_length=64)
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = Field(None, description="is the content if there is no other")

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        # An answer may end before its text begins, and a tool may return nothing.
        if self.content is None and self.role not in ("assistant", "tool") and not self.tool_calls:
            raise field_problem("content", "is missing")
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the message in the engine's format."""
        content: Any = self.refusal if self.content is None else self.content
        if isinstance(content, list):
            content = [part.as_json() for part in content if not part.is_empty]
        message = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
        }
        return message | {name: value for name, value in optional.items() if value is not None}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatOptions(RequestBody):
    """Options for rendering messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    reasoning_effort: str | None = Field(None, max_length=64)
    # The engine checks whether the model's template takes them.
    documents: list[dict[str, Any]] | None = Field(None, max_length=MAX_DOCUMENTS, fail_fast=True)


def chat_prompt(messages: Sequence[Message], options: ChatOptions) -> dict[str, Any]:
    """Return messages and their options in the engine's format."""
    return {
        "messages": [message.as_json() for message in messages],
        **{
            name: value
            for name, value in given(options, ChatOptions.model_fields).items()
            if name != "documents" or value
        },
    }
