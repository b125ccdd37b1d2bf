"""The bodies of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PrivateAttr

from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import RequestBody
from paged_client.gateway.schema.chat_messages import ChatOptions, Messages, chat_prompt
from paged_client.gateway.schema.prompts import TokenIds
from paged_client.routing import RoutedPrompt


class TokenizeRequest(ChatOptions):
    """The body of ``/tokenize``: a prompt or messages."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    _prompt: str | dict[str, Any] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError.field("prompt", "give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ApiError.field("add_special_tokens", "is only for prompt: the template adds them")
        self._prompt = self.prompt or ""
        if self.messages is not None:
            self._prompt = chat_prompt(self.messages, self)

    def routed(self) -> RoutedPrompt:
        """Return the prompt to tokenize."""
        return self._prompt


class DetokenizeRequest(RequestBody):
    """The body of ``/detokenize``."""

    model: str | None = Field(None, max_length=256)
    tokens: TokenIds
