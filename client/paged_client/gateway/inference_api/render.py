"""The routes ``/v1/chat/completions/render`` and ``/v1/completions/render``."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from paged_client.gateway.backend_pool import BackendPool
from paged_client.gateway.bodies import body_of
from paged_client.gateway.dependencies import Servers, engine_params
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json, to_json
from paged_client.gateway.inference_api.schema import TOOL_FIELDS
from paged_client.gateway.responses import while_connected
from paged_client.gateway.schema.body import given
from paged_client.gateway.schema.chat_completions import ChatRequest
from paged_client.gateway.schema.completions import CompletionRequest
from paged_client.gateway.schema.generation import EngineFields, GenerateRequest
from paged_client.gateway.schema.prompts import TextOrIds
from paged_client.gateway.served_names import ServedModel

ChatBody = Annotated[ChatRequest, Depends(body_of(ChatRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]

_PASSED_ON = (
    *(name for name in EngineFields.model_fields if name != "model"),
    "cache_hit_threshold",
    "speculate",
)


async def render_chat(request: Request, body: ChatBody, servers: Servers) -> Response:
    """Return the request for ``/inference/v1/generate`` that a chat is."""
    if body.continue_final_message:
        raise ApiError.field(
            "continue_final_message", "must be false: token ids do not say where the answer begins"
        )
    model = await servers.resolve(body.model)
    tenant = engine_params(request, body).get("tenant")
    prompt, tools, choice = body.routed(), body.tools or None, body.tool_choice
    token_ids = await while_connected(
        request,
        servers.ask(
            model,
            lambda client: client.tokenize(prompt, tenant=tenant, tools=tools, tool_choice=choice),
        ),
    )
    rendered = _rendered("chatcmpl-", model.shown, body, token_ids, body.token_limit)
    if body.logprobs:
        rendered["sampling_params"]["logprobs"] = body.top_logprobs or 0
    rendered["parse_context"] = {
        **given(body, TOOL_FIELDS),
        "include_reasoning": body.include_reasoning,
    }
    return _json(rendered)


async def render_completions(request: Request, body: CompletionBody, servers: Servers) -> Response:
    """Return a list of requests for ``/inference/v1/generate``, one for each prompt."""
    if body.echo:
        raise ApiError.field("echo", "must be false: a rendered prompt is not part of the answer")
    model = await servers.resolve(body.model)
    tenant = engine_params(request, body).get("tenant")

    async def tokenize_all() -> list[list[int]]:
        special = body.add_special_tokens
        return [await _ids(servers, model, prompt, special, tenant) for prompt in body.prompt]

    rendered = [
        _rendered("cmpl-", model.shown, body, token_ids, body.max_tokens)
        for token_ids in await while_connected(request, tokenize_all())
    ]
    for one in rendered:
        one["sampling_params"] |= given(body, ("logprobs",))
    return _json(rendered)


async def _ids(
    servers: BackendPool, model: ServedModel, prompt: TextOrIds, special: bool, tenant: str | None
) -> list[int]:
    if not isinstance(prompt, str):
        return prompt.tolist()
    tokens = await servers.ask(
        model, lambda client: client.tokenize(prompt, add_special_tokens=special, tenant=tenant)
    )
    return list(tokens)


def _rendered(
    id_prefix: str,
    model: str,
    body: GenerateRequest,
    token_ids: Iterable[int],
    max_tokens: int | None,
) -> Json:
    sampling = body.sampling_fields()
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    options, prediction = body.stream_options, body.prediction
    return {
        "request_id": id_prefix + uuid.uuid4().hex,
        "model": model,
        "token_ids": list(token_ids),
        "sampling_params": sampling,
        "stream": body.stream,
        "stream_options": None if options is None else options.model_dump(),
        **given(body, _PASSED_ON),
        **({} if prediction is None else {"prediction": prediction.text}),
    }


def _json(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")
