"""The body of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from paged_client.gateway.errors import ApiError
from paged_client.gateway.items import OpenObject
from paged_client.gateway.responses_api.items import Input
from paged_client.gateway.responses_api.prompt import messages_of
from paged_client.gateway.schema.body import INT32_MAX, given
from paged_client.gateway.schema.chat_messages import MAX_PARTS, MAX_TOOLS
from paged_client.gateway.schema.generation import SamplingFields
from paged_client.routing import RoutedPrompt

# Fields that have no effect here. The gateway stores nothing and has no built-in tools, and the
# engine refuses a prompt that is too long.
IGNORED = frozenset(
    (
        *("user", "store", "service_tier", "safety_identifier", "client_metadata"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("stream_options", "max_tool_calls", "context_management", "truncation"),
        *("access_programs", "request_id"),
    )
)
NOT_SUPPORTED: Mapping[str, Any] = {
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "moderation")),
    "background": False,
    "top_logprobs": 0,
}
_LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 64


class ReasoningOptions(OpenObject):
    """The field ``reasoning``: the effort that the model should make."""

    effort: str | None = Field(None, max_length=64)
    summary: str | None = Field(None, max_length=64)


class TextFormat(OpenObject):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None


class TextOptions(OpenObject):
    """Options for the text."""

    format: TextFormat | None = None


class ResponsesRequest(SamplingFields):
    """The body of ``/v1/responses``."""

    ignored: ClassVar[frozenset[str]] = IGNORED
    not_supported: ClassVar[Mapping[str, Any]] = NOT_SUPPORTED

    input: Input
    instructions: str | None = None
    tools: list[dict[str, Any]] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    include: list[str] = Field([], max_length=MAX_PARTS, fail_fast=True)
    metadata: dict[str, Any] = Field({}, max_length=MAX_METADATA)
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    _functions: list[dict[str, Any]] = PrivateAttr()
    _prompt: dict[str, Any] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields; build the prompt, for a large body in its thread."""
        if _LOGPROBS in self.include:
            raise ApiError.field("include", f"{_LOGPROBS} is not supported yet")
        self._functions = [tool for tool in self.tools if tool.get("type") == "function"]
        self._prompt = {
            "messages": messages_of(self.instructions, self.input),
            **given(self, ("chat_template_kwargs",)),
        }
        if self.reasoning is not None and self.reasoning.effort is not None:
            self._prompt["reasoning_effort"] = self.reasoning.effort

    def routed(self) -> RoutedPrompt:
        """Return the prompt."""
        return self._prompt

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that are functions, the only ones that the model can call."""
        return self._functions

    def engine_fields(self) -> dict[str, Any]:
        """Return the engine's fields; without a limit an answer may fill the context."""
        values = super().engine_fields()
        values["max_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            values |= _response_format(self.text.format)
        if self.functions:
            values["tools"] = [_nested(tool) for tool in self.functions]
            values |= given(self, ("parallel_tool_calls",))
        if self.tool_choice is not None and (self.functions or self.tool_choice != "auto"):
            values["tool_choice"] = _tool_choice(self.tool_choice)
        return values


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type == "text":
        return {}
    if form.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.json_schema is None:
        raise ApiError.field("text.format.schema", "is missing")
    schema = {"schema": form.json_schema, **given(form, ("name", "strict", "description"))}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a function tool in the format of chats."""
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return a tool choice in the format of chats."""
    if isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "function":
            return _chosen(choice)
        case "allowed_tools":
            tools = choice.get("tools")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise ApiError.field("tool_choice.tools", "must be a list of tools")
            functions = [_chosen(tool) for tool in tools if tool.get("type") == "function"]
            allowed = {"mode": choice.get("mode"), "tools": functions}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    raise ApiError.field("tool_choice.type", "must be function or allowed_tools")


def _chosen(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.get("name")}}
