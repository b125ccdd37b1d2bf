"""Endpoint for OpenAI's API: the gateway or any other compatible server."""

from __future__ import annotations

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_loadtest.destination import ServerInfo
from paged_loadtest.endpoints.http import HttpEndpoint
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols import openai
from paged_loadtest.timeline import Timeline

_REFUSED = ("HTTP 400", "HTTP 422")


class OpenAIEndpoint(HttpEndpoint):
    """Completions, or chats for ``--backend openai-chat``."""

    def __init__(self, target: TargetOptions) -> None:
        super().__init__(target, openai.authorization())
        self._is_chat = target.backend == "openai-chat"
        self._path = openai.CHATS if self._is_chat else openai.COMPLETIONS
        self._continuous_usage = False

    async def check(self) -> ServerInfo:
        """Check the model, and detect whether the server supports vLLM's extra fields."""
        answer = await self._ask("GET", openai.MODELS)
        card = openai.find_model(self._destination, *answer)
        await self._try_extras()
        return ServerInfo(
            str(card.get("owned_by", "unknown")), card.get("vocab_size"), card.get("max_model_len")
        )

    async def is_ready(self) -> bool:
        try:
            openai.find_model(self._destination, *await self._ask("GET", openai.MODELS))
        except ConfigError:
            return False
        return True

    async def send(self, request: WorkloadRequest) -> Timeline:
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
