"""The gateway's routes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from paged_client import ClientError, Unavailable
from paged_client.gateway.auth import ApiKey, RequireApiKey, tenant_of
from paged_client.gateway.drain import Drain
from paged_client.gateway.errors import ApiError
from paged_client.gateway.fleet import Call, Fleet
from paged_client.gateway.limits import RequestLimits
from paged_client.gateway.metrics import Metrics, RequestMetrics
from paged_client.gateway.replies import ClientGone, Reply, respond, while_connected
from paged_client.gateway.schema import (
    ChatBody,
    CompletionBody,
    CompletionRequest,
    DetokenizeBody,
    GenerateRequest,
    StreamOptions,
    TextOrIds,
    TokenizeBody,
    chat_prompt,
    describe,
)
from paged_client.gateway.shapes import ChatShape, CompletionShape, EchoedPrompt

_STARTED_AT = int(time.time())
_CLIENT_CLOSED_REQUEST = 499  # seen in the metrics only


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What an operator chooses.

    ``api_keys``: without any, everybody is let in. ``request_timeout_s`` is for a whole answer.
    ``max_stream_backlog``: tokens of a stream that may wait for its reader before it is ended.
    ``drain_timeout_s``: for how long running requests may go on when the gateway is told to stop.
    """

    triton: tuple[str, ...] = ("127.0.0.1:8001",)
    api_keys: tuple[ApiKey, ...] = ()
    request_timeout_s: float | None = None
    max_body_bytes: int = 8 * 2**20
    max_stream_backlog: int = 4096
    drain_timeout_s: float = 20.0


async def _fleet(request: Request) -> Fleet:  # a plain function would run in a thread
    request.app.state.drain.check()
    fleet: Fleet = request.app.state.fleet
    return fleet


Servers: TypeAlias = Annotated[Fleet, Depends(_fleet)]


def create_app(options: GatewayOptions, drain: Drain | None = None) -> ASGIApp:
    """The whole gateway as an ASGI application; ``drain`` is for whoever stops it."""
    metrics = Metrics()
    drain = drain or Drain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Fleet(options.triton, metrics, drain, options.request_timeout_s) as fleet:
            app.state.fleet = fleet
            yield

    app = FastAPI(title="paged-backend", lifespan=lifespan, redoc_url=None, redirect_slashes=False)
    app.state.drain = drain
    app.state.metrics = metrics
    app.state.options = options
    _add_routes(app)
    _add_error_handlers(app)
    guarded: ASGIApp = RequestMetrics(RequestLimits(app, options.max_body_bytes), metrics)
    # Outermost: nothing is read or looked at before the key.
    return RequireApiKey(guarded, options.api_keys) if options.api_keys else guarded


def _add_routes(app: FastAPI) -> None:
    app.post("/v1/chat/completions")(chat)
    app.post("/v1/completions")(complete)
    app.get("/v1/models")(list_models)
    app.get("/v1/models/{model}")(show_model)
    app.post("/tokenize")(tokenize)
    app.post("/detokenize")(detokenize)
    app.get("/health")(health)
    app.get("/metrics")(show_metrics)


async def chat(request: Request, body: ChatBody, servers: Servers) -> Response:
    """Answer a conversation."""
    model = await servers.resolve(body.model)
    params = _sampling(request, body)
    call = Call(model, chat_prompt(body.messages, body), params, whole=not body.stream)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    shape = ChatShape(num_top, body.prompt_logprobs is not None)
    return await respond(request, Reply(model, shape, [servers.stream(call)]), _stream(body))


async def complete(request: Request, body: CompletionBody, servers: Servers) -> Response:
    """Go on with one or more texts."""
    model = await servers.resolve(body.model)
    params = _sampling(request, body)
    calls = [
        Call(model, prompt, params, body.add_special_tokens, whole=not body.stream)
        for prompt in body.prompt
    ]
    echoed = None
    if body.echo:
        echoed = await while_connected(request, _echoed_prompts(servers, model, body))
    shape = CompletionShape(
        n=body.n or 1,
        num_top=body.logprobs,
        echoed=echoed,
        with_output=body.max_tokens != 0,
        with_prompt_logprobs=body.prompt_logprobs is not None,
    )
    streams = [servers.stream(call) for call in calls]
    return await respond(request, Reply(model, shape, streams), _stream(body))


async def list_models(servers: Servers) -> Response:
    """All models that answer now."""
    data = []
    for model in await servers.models():
        with contextlib.suppress(Unavailable):
            data.append(await _model_card(servers, model))
    return JSONResponse({"object": "list", "data": data})


async def show_model(model: str, servers: Servers) -> Response:
    """One model."""
    return JSONResponse(await _model_card(servers, await servers.resolve(model)))


async def tokenize(body: TokenizeBody, servers: Servers) -> Response:
    """The token ids that a prompt becomes."""
    model = await servers.resolve(body.model)
    prompt, special = body.routed(), body.add_special_tokens is not False
    info = await servers.info(model)
    tokens = await servers.ask(
        model, lambda client: client.tokenize(prompt, add_special_tokens=special)
    )
    return JSONResponse(
        {"count": len(tokens), "max_model_len": info.max_model_len, "tokens": tokens}
    )


async def detokenize(body: DetokenizeBody, servers: Servers) -> Response:
    """The text that token ids stand for."""
    model = await servers.resolve(body.model)
    text = await servers.ask(model, lambda client: client.detokenize(body.tokens))
    return JSONResponse({"prompt": text})


async def health(servers: Servers) -> Response:
    """200 if any model takes requests, else 503. Needs no API key."""
    return Response(status_code=200 if await servers.is_ready() else 503)


async def show_metrics(request: Request) -> Response:
    """Prometheus' text format."""
    metrics: Metrics = request.app.state.metrics
    return Response(metrics.page(), media_type="text/plain; version=0.0.4")


async def _echoed_prompts(
    servers: Fleet, model: str, body: CompletionRequest
) -> list[EchoedPrompt]:
    """The prompts' texts, and their first tokens where log-probabilities are wanted."""
    return [
        EchoedPrompt(
            await _text(servers, model, prompt),
            None if body.logprobs is None else await _first_token(servers, model, prompt, body),
        )
        for prompt in body.prompt
    ]


async def _text(servers: Fleet, model: str, prompt: TextOrIds) -> str:
    if isinstance(prompt, str):
        return prompt
    return await servers.ask(model, lambda client: client.detokenize(prompt))


async def _first_token(
    servers: Fleet, model: str, prompt: TextOrIds, body: CompletionRequest
) -> str:
    if isinstance(prompt, list):
        return await _text(servers, model, prompt[:1])
    special = body.add_special_tokens
    ids = await servers.ask(
        model, lambda client: client.tokenize(prompt, add_special_tokens=special)
    )
    return await _text(servers, model, list(ids[:1]))


async def _model_card(servers: Fleet, model: str) -> dict[str, Any]:
    info = await servers.info(model)
    return {
        "id": model,
        "object": "model",
        "created": _STARTED_AT,
        "owned_by": "paged-backend",
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
    }


def _sampling(request: Request, body: GenerateRequest) -> dict[str, Any]:
    """The engine's fields. With API keys, nobody acts for another tenant or gets before it."""
    params, tenant = body.sampling(), tenant_of(request)
    if tenant is None:
        return params
    if body.tenant is not None:
        raise ApiError.field("tenant", "is that of the API key; leave it out")
    if body.priority is not None and body.priority < 0:
        raise ApiError.field("priority", "must be at least 0 with an API key")
    if body.cache_salt is not None:
        params["cache_salt"] = sha256(f"{tenant}\0{body.cache_salt}".encode()).hexdigest()
    return params | {"tenant": tenant}


def _stream(body: GenerateRequest) -> StreamOptions | None:
    return (body.stream_options or StreamOptions()) if body.stream else None


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def client_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ClientError)
        return ApiError.from_client(error).response()

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return describe(error.errors()).response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def fault(request: Request, error: Exception) -> Response:
        return ApiError(500, "internal error; the gateway's log has more").response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ClientError, client_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(Exception, fault)
