"""OpenAI's ``/v1/completions`` and ``/v1/chat/completions`` as server-sent events."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from paged_backend.tools.workloads.request import Prompt, WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_loadtest.destination import Destination
from paged_loadtest.protocols.decoding import EventDecoder
from paged_loadtest.timeline import Timeline

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
MODELS = "/v1/models"
KEY_VARIABLE = "OPENAI_API_KEY"


def authorization() -> dict[str, str]:
    """Return the header with the API key of the environment, if there is one."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def find_model(destination: Destination, status: int, answer: Any) -> Mapping[str, Any]:
    """Return the model's entry in the answer to ``MODELS``.

    Raises:
        ConfigError: the server wants a key, speaks another protocol, or lacks the model.
    """
    if status in (401, 403):
        raise ConfigError(f"{KEY_VARIABLE}: {destination.address} wants an API key; set it")
    if status != 200 or not isinstance(answer, dict) or "data" not in answer:
        raise destination.unreachable(f"HTTP {status} for {MODELS}")
    cards = {card["id"]: card for card in answer["data"]}
    if destination.model not in cards:
        raise destination.unknown_model(cards)
    card: Mapping[str, Any] = cards[destination.model]
    return card


def encode(
    request: WorkloadRequest,
    model: str,
    *,
    chat: bool = False,
    continuous_usage: bool = True,
    cache_salt: str | None = None,
) -> bytes:
    """Encode the body to post to ``CHATS`` or ``COMPLETIONS``.

    ``continuous_usage`` requests the token count with each chunk: without it, a chunk of tokens
    that have no text yet looks like a chunk without tokens.

    Raises:
        ConfigError: the path does not accept this kind of prompt.
    """
    body = {
        "model": model,
        **(_messages(request.prompt) if chat else _prompt(request.prompt)),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {
            "include_usage": True,
            **({"continuous_usage_stats": True} if continuous_usage else {}),
        },
        **({"ignore_eos": True} if request.ignore_eos else {}),
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
    }
    return json.dumps(body).encode()


class OpenAIDecoder(EventDecoder):
    """Decodes the response body."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._num_tokens = 0

    def _take(self, event: Any, now_s: float) -> None:
        if event.get("error"):
            error = event["error"]
            self.fail(error["message"] if isinstance(error, Mapping) else str(error))
            return
        text = "".join(map(_text, event["choices"][:1]))
        usage = event.get("usage")
        if usage is None:
            brings_tokens = bool(text)
        else:
            count = usage.get("completion_tokens") or 0
            brings_tokens = bool(event["choices"]) and count > self._num_tokens
            self._num_tokens = count
            self._take_usage(usage)
        if brings_tokens:
            self.timeline.arrivals_s.append(now_s)
        if text:
            self.texts.append(text)

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        timeline = self.timeline
        timeline.num_output_tokens = self._num_tokens
        timeline.num_input_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details")
        if details is not None:
            timeline.num_cached_tokens = details.get("cached_tokens")

    def _end(self) -> None:
        self.done = True


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content")
    return text or ""


def _prompt(prompt: Prompt) -> dict[str, Any]:
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        raise ConfigError("chats go to --backend openai-chat, or triton; openai takes text and ids")
    return {"prompt": prompt}


def _messages(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"messages": [{"role": "user", "content": prompt}]}
    if not prompt or not isinstance(prompt[0], Mapping):
        raise ConfigError("token ids go to --backend openai, or triton; openai-chat takes chats")
    return {"messages": prompt}
