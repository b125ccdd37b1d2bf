"""Builds the response to an HTTP request from chunks, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paged_client import Chunk, ClientError, Completion, CompletionBuilder
from paged_client.gateway.backlog import Backlog
from paged_client.gateway.errors import ApiError
from paged_client.gateway.response_formats import Json, ResponseFormat
from paged_client.gateway.schema import StreamOptions

T = TypeVar("T")
Chunks = AsyncGenerator[Chunk, None]

_DONE = b"data: [DONE]\n\n"
_to_json = json.JSONEncoder(separators=(",", ":")).encode


MAX_LOGPROBS = 2**17  # of a whole response, over all prompts
_MANY_LOGPROBS = 2**9


class ClientGone(Exception):
    """The client has disconnected before its response."""


class Usage:
    """Token counts of a request so far."""

    def __init__(self, counts_output: bool) -> None:
        self._counts_output = counts_output
        self._prompts: dict[int, tuple[int, int]] = {}  # number of tokens and of cached tokens
        self._num_output_tokens = 0

    def count(self, prompt: int, chunk: Chunk) -> None:
        """Count the tokens of a chunk of one of the prompts."""
        self._prompts[prompt] = (chunk.num_input_tokens, chunk.num_cached_tokens)
        if self._counts_output:
            self._num_output_tokens += chunk.num_output_tokens

    def as_json(self) -> Json:
        """Return OpenAI's ``usage`` object."""
        num_prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(cached for _, cached in self._prompts.values())
            },
        }


class GatewayResponse:
    """The response to one HTTP request; ``streams`` has the chunks of each of its prompts."""

    def __init__(
        self, model: str, response_format: ResponseFormat, streams: Sequence[Chunks]
    ) -> None:
        self._model = model
        self._format = response_format
        self._streams = streams
        self._usage = Usage(response_format.counts_output)
        self._id = response_format.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())

    async def whole(self) -> Json:
        """Return the response as one JSON object. Raises ClientError or ApiError."""
        builders = [CompletionBuilder() for _ in self._streams]
        num_logprobs = 0
        async with Backlog(self._streams, math.inf) as chunks:
            async for prompt, chunk in chunks:
                self._usage.count(prompt, chunk)
                num_logprobs += _num_logprobs(chunk)
                if num_logprobs > MAX_LOGPROBS:
                    raise ApiError.field(
                        "logprobs", f"a whole answer has at most {MAX_LOGPROBS} in all; stream it"
                    )
                builders[prompt].add(chunk)
        completions = [builder.build() for builder in builders]
        if num_logprobs > _MANY_LOGPROBS:  # must not block the event loop
            return await asyncio.to_thread(self._content, completions)
        return self._content(completions)

    def _content(self, completions: Sequence[Completion]) -> Json:
        choices = [
            self._format.choice(prompt, index, completion)
            for prompt, completion in enumerate(completions)
            for index in range(len(completion.answers))
        ]
        return {
            **self._head(self._format.whole_object),
            "choices": choices,
            "usage": self._usage.as_json(),
            **self._format.extras(completions),
        }

    async def events(self, options: StreamOptions, max_backlog: int) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events.

        Raises ClientError or ApiError before the first event; later errors are sent as an event.
        """
        head = self._head(self._format.chunk_object)
        has_begun = False
        try:
            async with Backlog(self._streams, max_backlog) as chunks:
                async for prompt, chunk in chunks:
                    self._usage.count(prompt, chunk)
                    if options.continuous_usage_stats:
                        head["usage"] = self._usage.as_json()
                    elif options.include_usage:
                        head["usage"] = None
                    choices = self._format.choices(prompt, chunk)
                    if choices:
                        has_begun = True
                        yield b"".join(_event({**head, "choices": [choice]}) for choice in choices)
            if options.include_usage:
                yield _event({**head, "choices": [], "usage": self._usage.as_json()})
        except (ApiError, ClientError) as error:
            if not has_begun:
                raise
            refusal = error if isinstance(error, ApiError) else ApiError.from_client(error)
            yield _event(refusal.body)
        yield _DONE

    def _head(self, object_name: str) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
        }


class EventStream(StreamingResponse):
    """A response of server-sent events, of which the first is given; ends if the client leaves."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_chain(first, rest), headers=headers, media_type="text/event-stream")
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancels the underlying requests if the client leaves before the end."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def respond(
    request: Request, response: GatewayResponse, stream: StreamOptions | None
) -> Response:
    """Return the HTTP response. Raises ClientError, ApiError, or ClientGone if the client left."""
    if stream is None:
        content = await while_connected(request, response.whole())
        return Response(_to_json(content), media_type="application/json")
    events = response.events(stream, request.app.state.options.max_stream_backlog)
    return EventStream(await while_connected(request, _next(events)), events)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancels it and raises ClientGone if the client leaves."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        if working.cancel():
            with contextlib.suppress(asyncio.CancelledError):
                await working


def _num_logprobs(chunk: Chunk) -> int:
    prompt = (position for position in chunk.prompt_logprobs if position is not None)
    return sum(map(len, chunk.logprobs)) + sum(map(len, prompt))


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


def _event(content: Json) -> bytes:
    return f"data: {_to_json(content)}\n\n".encode()
