"""Endpoint for OpenAI's API: the gateway or any other compatible server."""

from __future__ import annotations

import os

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_loadtest.endpoints.complaints import unknown_model, unreachable
from paged_loadtest.endpoints.endpoint import ServerInfo
from paged_loadtest.endpoints.http import HttpEndpoint
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols import openai
from paged_loadtest.timeline import Timeline

KEY_VARIABLE = "OPENAI_API_KEY"

_MODELS = "/v1/models"
_REFUSED = ("HTTP 400", "HTTP 422")


class OpenAIEndpoint(HttpEndpoint):
    """Completions, or chats for ``--backend openai-chat``; `KEY_VARIABLE` holds the API key."""

    def __init__(self, target: TargetOptions) -> None:
        key = os.environ.get(KEY_VARIABLE)
        super().__init__(target, headers={"Authorization": f"Bearer {key}"} if key else {})
        self._is_chat = target.backend == "openai-chat"
        self._path = openai.CHATS if self._is_chat else openai.COMPLETIONS
        self._continuous_usage = False

    async def check(self) -> ServerInfo:
        """Check the model, and detect whether the server supports vLLM's extra fields."""
        status, answer = await self._ask("GET", _MODELS)
        if status in (401, 403):
            raise ConfigError(f"{KEY_VARIABLE}: {self._target.address} wants an API key; set it")
        if status != 200 or not isinstance(answer, dict) or "data" not in answer:
            raise unreachable(self._target, f"HTTP {status} for {_MODELS}")
        cards = {card["id"]: card for card in answer["data"]}
        if self._target.model not in cards:
            raise unknown_model(self._target, cards)
        await self._try_extras()
        card = cards[self._target.model]
        return ServerInfo(
            str(card.get("owned_by", "unknown")), card.get("vocab_size"), card.get("max_model_len")
        )

    async def is_ready(self) -> bool:
        """Return True if the server lists the model."""
        try:
            status, answer = await self._ask("GET", _MODELS)
        except ConfigError:
            return False
        return status == 200 and any(card["id"] == self._target.model for card in answer["data"])

    async def send(self, request: WorkloadRequest) -> Timeline:
        """Send a request and wait for the end of its response."""
        body = openai.encode(
            request,
            self._target.model,
            chat=self._is_chat,
            continuous_usage=self._continuous_usage,
            cache_salt=self._cache_salt,
        )
        return await self._stream(self._path, body, openai.OpenAIDecoder)

    async def _try_extras(self) -> None:
        """Request one token with vLLM's extra fields; stop using them if the server rejects it."""
        self._continuous_usage = self._knows_salt = True
        self.forget_cache()
        timeline = await self.send(WorkloadRequest("Hello", max_tokens=1, ignore_eos=False))
        if (timeline.error or "").startswith(_REFUSED):
            self._continuous_usage = self._knows_salt = False
            self._cache_salt = None
