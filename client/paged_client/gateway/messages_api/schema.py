"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from paged_client.gateway.errors import ApiError
from paged_client.gateway.items import OpenObject
from paged_client.gateway.messages_api.items import Messages, Texts
from paged_client.gateway.messages_api.prompt import chat_of
from paged_client.gateway.schema.body import INT32_MAX, RequestBody
from paged_client.gateway.schema.chat_messages import MAX_TOOLS
from paged_client.gateway.schema.generation import MAX_STOP_STRINGS, SamplingFields, StopString
from paged_client.routing import RoutedPrompt

# Fields that have no effect here. Prefixes are cached without markers, and the gateway has no
# accounts, regions or built-in tools.
IGNORED = frozenset(
    (
        *("metadata", "service_tier", "cache_control", "context_management", "diagnostics"),
        *("inference_geo", "speed", "user_profile_id", "workspace_id", "betas", "request_id"),
    )
)
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables of chat templates
NOT_SUPPORTED: Mapping[str, Any] = {"container": None, "mcp_servers": []}


class Thinking(OpenObject):
    """The field ``thinking``: turns reasoning on or off and limits its tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=INT32_MAX)


class ToolChoiceField(OpenObject):
    """The field ``tool_choice``: the tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=128)
    disable_parallel_tool_use: bool = False


class OutputFormat(OpenObject):
    """The form of the text."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputOptions(OpenObject):
    """Options for the answer; ``effort`` is not read, as not every model knows it."""

    format: OutputFormat | None = None


class MessagesPrompt(RequestBody):
    """The fields of a conversation; its tokens can be counted."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    not_supported: ClassVar[Mapping[str, Any]] = NOT_SUPPORTED

    messages: Messages
    system: Texts = ""
    tools: list[dict[str, Any]] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    _prompt: dict[str, Any] = PrivateAttr()
    _tool_options: dict[str, Any] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields; build the prompt, for a large body in its thread."""
        self._prompt = chat_of(self.system, self.messages)
        arguments = _switches(self.thinking) | (self.chat_template_kwargs or {})
        if arguments:
            self._prompt["chat_template_kwargs"] = arguments
        self._tool_options = _tool_options(self.tools, self.tool_choice)

    def routed(self) -> RoutedPrompt:
        """Return the prompt."""
        return self._prompt

    @property
    def tool_options(self) -> dict[str, Any]:
        """The tools and their choice in the format of chats."""
        return self._tool_options


class CountTokensRequest(MessagesPrompt):
    """The body of ``/v1/messages/count_tokens``."""

    model: str | None = Field(None, max_length=256)


class MessagesRequest(SamplingFields, MessagesPrompt):
    """The body of ``/v1/messages``."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    not_supported: ClassVar[Mapping[str, Any]] = NOT_SUPPORTED

    max_tokens: int = Field(ge=1, le=INT32_MAX)
    stop_sequences: list[StopString] = Field([], max_length=MAX_STOP_STRINGS, fail_fast=True)

    def engine_fields(self) -> dict[str, Any]:
        """Return the engine's fields."""
        values = super().engine_fields() | {"max_tokens": self.max_tokens} | self.tool_options
        if self.stop_sequences:
            values["stop"] = self.stop_sequences
        if self.thinking is not None and self.thinking.type == "enabled":
            if self.thinking.budget_tokens is None:
                raise ApiError.field("thinking.budget_tokens", "is missing")
            values["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "output", "schema": self.output_config.format.json_schema}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return values


def _switches(thinking: Thinking | None) -> dict[str, Any]:
    """Return the arguments that turn reasoning on or off in the chat templates that have one."""
    if thinking is None or thinking.type not in ("enabled", "disabled"):
        return {}
    return dict.fromkeys(_THINKING_SWITCHES, thinking.type == "enabled")


def _tool_options(tools: list[dict[str, Any]], choice: ToolChoiceField | None) -> dict[str, Any]:
    """Return tools in the format of chats, without those that the server would have to run."""
    functions = [
        _function(f"tools[{index}]", tool)
        for index, tool in enumerate(tools)
        if tool.get("type") in (None, "custom")
    ]
    options: dict[str, Any] = {"tools": functions} if functions else {}
    if choice is None or (choice.type == "auto" and not functions):
        return options
    options["tool_choice"] = _choice(choice)
    if choice.disable_parallel_tool_use:
        options["parallel_tool_calls"] = False
    return options


def _function(field: str, tool: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("input_schema"), dict):
        raise ApiError.field(f"{field}.input_schema", "must be an object")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    optional = {name: tool.get(name) for name in ("description", "strict")}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": function | given}


def _choice(choice: ToolChoiceField) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
