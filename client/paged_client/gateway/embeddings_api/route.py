"""The routes of embeddings, scores and rankings."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import numpy as np
from fastapi import Depends, Request, Response
from numpy.typing import NDArray

from paged_client import ClientError, Embedding, Score
from paged_client.gateway.backend_pool import BackendPool, BackendRequest
from paged_client.gateway.bodies import body_of
from paged_client.gateway.dependencies import Servers, engine_params
from paged_client.gateway.embeddings_api.schema import (
    EmbeddingFields,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from paged_client.gateway.errors import ApiError, openai_field
from paged_client.gateway.events import Json, to_json
from paged_client.gateway.responses import while_connected
from paged_client.gateway.schema.prompts import TextOrIds
from paged_client.gateway.served_names import ServedModel

# vLLM, Jina and Cohere have different ones, and their clients append them to an address.
SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
MAX_AT_ONCE = 64  # prompts of one HTTP request that are at the servers
_MANY_NUMBERS = 2**14  # above, the response is written in a thread
_SMALLEST_NORM = 1e-12
_PROMPT_NAMES = {"text_input", "text_pair", "input_ids", "prompt"}

EmbeddingBody = Annotated[EmbeddingRequest, Depends(body_of(EmbeddingRequest))]
PoolingBody = Annotated[PoolingRequest, Depends(body_of(PoolingRequest))]
ScoreBody = Annotated[ScoreRequest, Depends(body_of(ScoreRequest))]
RerankBody = Annotated[RerankRequest, Depends(body_of(RerankRequest))]
Names: TypeAlias = Callable[[int], str]
"""Returns the name of the field that has the prompt of this index."""
PairNames: TypeAlias = Callable[[bool, int], str]
"""Returns the name of the field that has the first or the second text of the pair of this index."""
T = TypeVar("T")


class _Form(NamedTuple):
    """The names in an answer with embeddings."""

    id_prefix: str
    object_name: str
    field: str


_EMBEDDING = _Form("embd-", "embedding", "embedding")
_POOLING = _Form("pool-", "pooling", "data")


async def embed(request: Request, body: EmbeddingBody, servers: Servers) -> Response:
    """Create the embeddings of one or more prompts."""
    return await _answer(request, body, servers, _EMBEDDING)


async def pool(request: Request, body: PoolingBody, servers: Servers) -> Response:
    """Create the embeddings of one or more prompts, in the form of vLLM's ``/pooling``."""
    return await _answer(request, body, servers, _POOLING)


async def _answer(
    request: Request, body: EmbeddingRequest, servers: BackendPool, form: _Form
) -> Response:
    is_list = len(body.input) > 1
    model, found = await _embed(
        request, body, servers, body.input, lambda index: f"input[{index}]" if is_list else "input"
    )
    as_base64 = body.encoding_format == "base64"
    content = {
        "object": "list",
        "id": f"{form.id_prefix}{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": model.shown,
        "usage": _usage(found),
    }
    if not as_base64 and sum(len(item.vector) for item in found) > _MANY_NUMBERS:
        text = await asyncio.to_thread(_with_embeddings, content, found, as_base64, form)
    else:
        text = _with_embeddings(content, found, as_base64, form)
    return Response(text, media_type="application/json")


async def score(request: Request, body: ScoreBody, servers: Servers) -> Response:
    """Score pairs of texts: by a reranker, or by the cosine similarity of their embeddings."""
    first, second = body.pairs
    first_name, second_name = body.names
    if len(first) not in (1, len(second)):
        raise ApiError.field(
            first_name, f"must have 1 or {len(second)} texts, as {second_name} has"
        )

    def name(is_second: bool, index: int) -> str:
        if is_second:
            return f"{second_name}[{index}]"
        return f"{first_name}[{index if len(first) > 1 else 0}]"

    model, scores, usage = await _scores(request, body, servers, first, second, name)
    content = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model.shown,
        "data": [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(scores)
        ],
        "usage": usage,
    }
    return Response(to_json(content), media_type="application/json")


async def rerank(request: Request, body: RerankBody, servers: Servers) -> Response:
    """Sort documents by their scores for a query."""

    def name(is_second: bool, index: int) -> str:
        return f"documents[{index}]" if is_second else "query"

    model, scores, usage = await _scores(request, body, servers, [body.query], body.documents, name)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    version = "2" if request.scope["path"].startswith("/v2/") else "1"
    content = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model.shown,
        "usage": usage,
        "results": [
            {
                "index": index,
                **({"document": {"text": body.documents[index]}} if body.return_documents else {}),
                "relevance_score": scores[index],
            }
            for index in order[: body.top_n or None]
        ],
        # Cohere's part of the answer; the other ones are Jina's and vLLM's.
        "meta": {
            "api_version": {"version": version},
            "tokens": {"input_tokens": usage["prompt_tokens"]},
        },
    }
    return Response(to_json(content), media_type="application/json")


async def _scores(
    request: Request,
    body: EmbeddingFields,
    servers: BackendPool,
    first: Sequence[str],
    second: Sequence[str],
    name: PairNames,
) -> tuple[ServedModel, list[float], Json]:
    """Return the model, the score of each pair, and the usage. Raises ApiError.

    A single first text is paired with each second one.
    """
    model = await servers.resolve(body.model)
    info = await servers.info(model)
    if info.scores_pairs:
        found = await _score_pairs(request, body, servers, model, first, second, name)
        return model, [item.value for item in found], _usage(found)
    split = len(first)

    def prompt_name(index: int) -> str:
        return name(index >= split, index - split if index >= split else index)

    _, vectors = await _embed(request, body, servers, [*first, *second], prompt_name)
    return model, _similarities(vectors[:split], vectors[split:]), _usage(vectors)


async def _score_pairs(
    request: Request,
    body: EmbeddingFields,
    servers: BackendPool,
    model: ServedModel,
    first: Sequence[str],
    second: Sequence[str],
    name: PairNames,
) -> list[Score]:
    """Return the scores of a reranker. Raises ApiError."""
    if not body.add_special_tokens:
        raise ApiError.field("add_special_tokens", "must be true for a reranker")
    params = engine_params(request, body)
    queries = [*first] * (len(second) if len(first) == 1 else 1)

    def call(index: int) -> Awaitable[Score]:
        return servers.score(BackendRequest(model, queries[index], params), second[index])

    def field(index: int, engine_name: str) -> str:
        return _field(engine_name, name(engine_name != "text_input", index))

    return await while_connected(request, _all(len(second), call, field))


async def _embed(
    request: Request,
    body: EmbeddingFields,
    servers: BackendPool,
    prompts: Sequence[TextOrIds],
    name: Names,
) -> tuple[ServedModel, list[Embedding]]:
    """Return the model and the embeddings of all prompts. Raises ApiError."""
    model = await servers.resolve(body.model)
    params = engine_params(request, body)
    requests = [
        BackendRequest(model, prompt, params, body.add_special_tokens) for prompt in prompts
    ]

    def call(index: int) -> Awaitable[Embedding]:
        return servers.embed(requests[index])

    def field(index: int, engine_name: str) -> str:
        return _field(engine_name, name(index))

    return model, await while_connected(request, _all(len(requests), call, field))


async def _all(
    number: int, call: Callable[[int], Awaitable[T]], field: Callable[[int, str], str]
) -> list[T]:
    """Return the results of calls in their order; after an error, cancel the others.

    Args:
        number: number of calls.
        call: starts the call of an index.
        field: returns the field of the body for an index and an engine's name of a field.
    """
    turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(index: int) -> T:
        async with turns:
            try:
                return await call(index)
            except ClientError as error:
                raise ApiError.from_client(error, partial(field, index)) from None

    tasks = [asyncio.create_task(one(index)) for index in range(number)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _field(engine_name: str, prompt_name: str) -> str:
    if engine_name in _PROMPT_NAMES:
        return prompt_name
    return openai_field(engine_name)


def _with_embeddings(
    content: Json, found: Sequence[Embedding], as_base64: bool, form: _Form
) -> str:
    data = [
        {
            "object": form.object_name,
            "index": index,
            form.field: _base64(item.vector) if as_base64 else item.vector.tolist(),
        }
        for index, item in enumerate(found)
    ]
    return to_json({**content, "data": data})


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


def _usage(found: Sequence[Embedding | Score]) -> Json:
    number = sum(item.num_input_tokens for item in found)
    cached = sum(item.num_cached_tokens for item in found)
    return {
        "prompt_tokens": number,
        "total_tokens": number,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _similarities(first: Sequence[Embedding], second: Sequence[Embedding]) -> list[float]:
    """Return the cosine similarity of each pair; a single first one is paired with each."""
    a = np.stack([item.vector for item in first]).astype(np.float64)
    b = np.stack([item.vector for item in second]).astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    similarities = (a * b).sum(1) / np.maximum(lengths, _SMALLEST_NORM)
    values: list[float] = similarities.clip(-1, 1).tolist()  # rounding can lead beyond
    return values
