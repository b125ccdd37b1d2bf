"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PrivateAttr

from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import INT32_MAX, given
from paged_client.gateway.schema.chat_messages import (
    MAX_TOOLS,
    ChatOptions,
    Messages,
    chat_prompt,
)
from paged_client.gateway.schema.generation import MAX_LOGPROBS, GenerateRequest
from paged_client.routing import RoutedPrompt


class ChatRequest(GenerateRequest, ChatOptions):
    """The body of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: Literal[False] | None = Field(None, description="the template adds them")
    # The engine reads these, too.
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    _prompt: dict[str, Any] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields; build the prompt, for a large body in its thread."""
        super().model_post_init(context)
        if self.top_logprobs and not self.logprobs:  # 0 asks for none, as in vLLM
            raise ApiError.field("top_logprobs", "is only for logprobs: true")
        self._prompt = chat_prompt(self.messages, self)

    def routed(self) -> RoutedPrompt:
        """Return the prompt."""
        return self._prompt

    @property
    def token_limit(self) -> int | None:
        """The maximum number of tokens of an answer, if any."""
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if limit is not None), None)

    def engine_fields(self) -> dict[str, Any]:
        """Return the engine's fields; without a limit a completion may fill the context."""
        values = super().engine_fields()
        values["max_tokens"] = self.token_limit
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values | self._tools()

    def _tools(self) -> dict[str, Any]:
        if not self.tools:
            # What a choice may be without tools is the engine's decision.
            return {} if self.tool_choice is None else {"tool_choice": self.tool_choice}
        return given(self, ("tools", "tool_choice", "parallel_tool_calls"))
