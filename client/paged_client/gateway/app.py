"""The gateway's routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from starlette.types import ASGIApp

from paged_client import InvalidRequest, Unavailable
from paged_client.gateway.adapters_api import (
    LOAD,
    UNLOAD,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_lora_adapter,
    unload_lora_adapter,
)
from paged_client.gateway.auth import OPEN_PATHS, RequireApiKey, tenant_of
from paged_client.gateway.backend_pool import BackendPool, BackendRequest
from paged_client.gateway.backlog import MAX_STARTING
from paged_client.gateway.bodies import BodyReader, body_of
from paged_client.gateway.cors import with_cors
from paged_client.gateway.dependencies import Servers, engine_params
from paged_client.gateway.documentation import document
from paged_client.gateway.drain import GatewayDrain
from paged_client.gateway.embeddings_api.route import (
    RERANK_PATHS,
    SCORE_PATHS,
    embed,
    pool,
    rerank,
    score,
)
from paged_client.gateway.embeddings_api.schema import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from paged_client.gateway.error_handlers import add_error_handlers
from paged_client.gateway.errors import ApiError
from paged_client.gateway.faults import Faults, log_unhandled
from paged_client.gateway.inference_api.render import render_chat, render_completions
from paged_client.gateway.inference_api.route import abort_requests, generate
from paged_client.gateway.inference_api.schema import AbortRequest, InferenceRequest
from paged_client.gateway.limits import BodyLimit
from paged_client.gateway.messages_api.route import count_tokens, create_message
from paged_client.gateway.messages_api.schema import CountTokensRequest, MessagesRequest
from paged_client.gateway.metrics import GatewayMetrics, RequestMetrics
from paged_client.gateway.openai_format import ChoicesFormat
from paged_client.gateway.options import GatewayOptions
from paged_client.gateway.request_ids import RequestIds
from paged_client.gateway.response_formats import (
    ChatCompletionFormat,
    CompletionFormat,
    EchoedPrompt,
)
from paged_client.gateway.responses import GatewayResponse, respond, while_connected
from paged_client.gateway.responses_api.route import create_response
from paged_client.gateway.responses_api.schema import ResponsesRequest
from paged_client.gateway.restrictions import RestrictRoutes
from paged_client.gateway.routing_headers import routing_hints
from paged_client.gateway.schema.body import RequestBody
from paged_client.gateway.schema.chat_completions import ChatRequest
from paged_client.gateway.schema.completions import CompletionRequest
from paged_client.gateway.schema.prompts import TextOrIds
from paged_client.gateway.schema.tokenization import DetokenizeRequest, TokenizeRequest
from paged_client.gateway.served_names import ServedModel, ServedNames
from paged_client.gateway.server_metrics import fetch_pages, join_pages
from paged_client.gateway.version import VERSION

_STARTED_AT = int(time.time())


ChatBody = Annotated[ChatRequest, Depends(body_of(ChatRequest))]
CompletionBody = Annotated[CompletionRequest, Depends(body_of(CompletionRequest))]
TokenizeBody = Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))]
DetokenizeBody = Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))]


def create_app(options: GatewayOptions, drain: GatewayDrain | None = None) -> ASGIApp:
    """Create the gateway as an ASGI application; its owner stops it with ``drain``."""
    metrics = GatewayMetrics()
    drain = drain or GatewayDrain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(log_unhandled)
        names = ServedNames(options.served_names)
        async with BackendPool(
            options.triton, metrics, drain, options.request_timeout_s, names
        ) as pool:
            app.state.pool = pool
            with contextlib.closing(app.state.bodies):
                yield

    app = FastAPIOffline(
        title="paged-backend", lifespan=lifespan, redoc_url=None, redirect_slashes=False
    )
    app.state.bodies = BodyReader()
    app.state.drain = drain
    app.state.metrics = metrics
    app.state.options = options
    _add_routes(app)
    bodies = dict(_BODIES)
    if options.runtime_lora_keys:
        _add_adapter_routes(app)
        bodies |= _ADAPTER_BODIES
    document(app, bodies, with_keys=bool(options.api_keys))
    add_error_handlers(app)
    guarded: ASGIApp = RequestMetrics(BodyLimit(app, options.max_body_bytes, OPEN_PATHS), metrics)
    if options.restrictions:
        guarded = RestrictRoutes(guarded, options.restrictions)
    # The key is checked before anything else is read or inspected.
    keyed = guarded
    if options.api_keys or options.runtime_lora_keys:
        others = dict.fromkeys(_ADAPTER_BODIES, options.runtime_lora_keys)
        keyed = RequireApiKey(guarded, options.api_keys, others)
    return Faults(RequestIds(with_cors(keyed, options.cors)))


_BODIES: dict[str, type[RequestBody]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions/render": CompletionRequest,
    "/inference/v1/generate": InferenceRequest,
    "/inference/v1/abort_requests": AbortRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/pooling": PoolingRequest,
    **dict.fromkeys(SCORE_PATHS, ScoreRequest),
    **dict.fromkeys(RERANK_PATHS, RerankRequest),
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ADAPTER_BODIES: dict[str, type[RequestBody]] = {
    LOAD: LoadAdapterRequest,
    UNLOAD: UnloadAdapterRequest,
}


def _add_adapter_routes(app: FastAPI) -> None:
    app.post(LOAD)(load_lora_adapter)
    app.post(UNLOAD)(unload_lora_adapter)


def _add_routes(app: FastAPI) -> None:
    app.post("/v1/chat/completions")(chat)
    app.post("/v1/completions")(complete)
    app.post("/v1/chat/completions/render")(render_chat)
    app.post("/v1/completions/render")(render_completions)
    app.post("/inference/v1/generate")(generate)
    app.post("/inference/v1/abort_requests")(abort_requests)
    app.post("/v1/responses")(create_response)
    app.post("/v1/messages")(create_message)
    app.post("/v1/messages/count_tokens")(count_tokens)
    app.post("/v1/embeddings")(embed)
    app.post("/pooling")(pool)
    for path in SCORE_PATHS:
        app.post(path)(score)
    for path in RERANK_PATHS:
        app.post(path)(rerank)
    app.get("/v1/models")(list_models)
    app.get("/v1/models/{model:path}")(show_model)
    app.post("/tokenize")(tokenize)
    app.post("/detokenize")(detokenize)
    app.get("/health")(health)
    app.get("/health/ready")(health)
    app.get("/health/live")(live)
    app.get("/version")(show_version)
    app.get("/metrics")(show_metrics)


async def chat(request: Request, body: ChatBody, servers: Servers) -> Response:
    """Create a chat completion."""
    model = await servers.resolve(body.model)
    params = engine_params(request, body)
    backend_request = BackendRequest(
        model,
        body.routed(),
        params,
        whole=not body.stream,
        parsed=True,
        hints=routing_hints(request),
    )
    choices = ChatCompletionFormat(
        num_top=(body.top_logprobs or 0) if body.logprobs else None,
        with_prompt_logprobs=body.prompt_logprobs is not None,
        with_reasoning=body.include_reasoning,
    )
    response_format = ChoicesFormat(model.shown, choices, body.stream_options)
    response = GatewayResponse(response_format, [servers.stream(backend_request)])
    return await respond(request, response, stream=body.stream)


async def complete(request: Request, body: CompletionBody, servers: Servers) -> Response:
    """Create completions of one or more prompts."""
    model = await servers.resolve(body.model)
    params = engine_params(request, body)
    # With ``whole`` there is no early first chunk at which Backlog could start the next request.
    whole = not body.stream and len(body.prompt) <= MAX_STARTING
    hints = routing_hints(request)
    backend_requests = [
        BackendRequest(model, prompt, params, body.add_special_tokens, whole, hints=hints)
        for prompt in body.prompt
    ]
    echoed = None
    if body.echo:
        tenant = tenant_of(request) or body.tenant
        echoed = await while_connected(request, _echoed_prompts(servers, model, body, tenant))
    choices = CompletionFormat(
        n=body.n or 1,
        num_top=body.logprobs,
        echoed=echoed,
        with_output=body.max_tokens != 0,
        with_prompt_logprobs=body.prompt_logprobs is not None,
    )
    streams = [servers.stream(backend_request) for backend_request in backend_requests]
    response_format = ChoicesFormat(model.shown, choices, body.stream_options)
    response = GatewayResponse(response_format, streams)
    return await respond(request, response, stream=body.stream)


async def list_models(servers: Servers) -> Response:
    """List all models that are available now."""
    data = []
    for model in await servers.models():
        with contextlib.suppress(Unavailable):
            data.append(await _model_card(servers, model, model.shown))
    return JSONResponse({"object": "list", "data": data})


async def show_model(model: str, servers: Servers) -> Response:
    """Describe one model."""
    return JSONResponse(await _model_card(servers, await servers.resolve(model), model))


async def tokenize(request: Request, body: TokenizeBody, servers: Servers) -> Response:
    """Return the token ids of a prompt."""
    model = await servers.resolve(body.model)
    prompt, special, tenant = (
        body.routed(),
        body.add_special_tokens is not False,
        tenant_of(request),
    )
    info = await servers.info(model)
    tokens = await servers.ask(
        model, lambda client: client.tokenize(prompt, add_special_tokens=special, tenant=tenant)
    )
    return JSONResponse(
        {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
    )


async def detokenize(request: Request, body: DetokenizeBody, servers: Servers) -> Response:
    """Return the text of token ids."""
    model = await servers.resolve(body.model)
    try:
        text = await _text(servers, model, body.tokens, tenant_of(request))
    except InvalidRequest as error:
        raise ApiError.from_client(error, _detokenize_field) from None
    return JSONResponse({"prompt": text})


def _detokenize_field(name: str) -> str:
    return "tokens" if name == "input_ids" else name


async def health(servers: Servers) -> Response:
    """Return 200 if any model accepts requests, otherwise 503. Needs no API key."""
    return Response(status_code=200 if await servers.is_ready() else 503)


async def live() -> Response:
    """Return 200 while the gateway runs. Needs no API key."""
    return Response()


async def show_version() -> Response:
    """Return the version of the gateway."""
    return JSONResponse({"version": VERSION})


async def show_metrics(request: Request) -> Response:
    """Return the metrics of the gateway and its servers in Prometheus' text format."""
    metrics: GatewayMetrics = request.app.state.metrics
    options: GatewayOptions = request.app.state.options
    pages = await fetch_pages(options.triton_metrics)
    page = metrics.page().decode() + join_pages(pages)
    return Response(page, media_type="text/plain; version=0.0.4")


async def _echoed_prompts(
    servers: BackendPool, model: ServedModel, body: CompletionRequest, tenant: str | None
) -> list[EchoedPrompt]:
    """Return the prompts' texts, and their first tokens if log-probabilities are requested."""
    special = body.add_special_tokens
    return [
        EchoedPrompt(
            await _text(servers, model, prompt, tenant),
            None
            if body.logprobs is None
            else await _first_token(servers, model, prompt, special, tenant),
        )
        for prompt in body.prompt
    ]


async def _text(
    servers: BackendPool, model: ServedModel, prompt: TextOrIds, tenant: str | None
) -> str:
    if isinstance(prompt, str):
        return prompt
    return await servers.ask(
        model, lambda client: client.detokenize(prompt, tenant=tenant, is_prompt=True)
    )


async def _first_token(
    servers: BackendPool, model: ServedModel, prompt: TextOrIds, special: bool, tenant: str | None
) -> str:
    ids: Sequence[int]
    if isinstance(prompt, str):
        ids = await servers.ask(
            model, lambda client: client.tokenize(prompt, add_special_tokens=special, tenant=tenant)
        )
    else:
        ids = prompt
    first = array("i", ids[:1])
    return await servers.ask(model, lambda client: client.detokenize(first, tenant=tenant))


async def _model_card(servers: BackendPool, model: ServedModel, name: str) -> dict[str, Any]:
    info = await servers.info(model)
    adapter = model.adapter
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_AT,
        "owned_by": "paged-backend",
        "root": servers.folder(model) if adapter else model.name,
        "parent": servers.first_name(model.name) if adapter else None,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
    }
