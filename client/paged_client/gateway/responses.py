"""Builds the response to an HTTP request from chunks, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paged_client import Chunk, ClientError, Completion, CompletionBuilder
from paged_client.gateway.backlog import Backlog
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json, to_json

T = TypeVar("T")
Chunks = AsyncGenerator[Chunk, None]

MAX_LOGPROBS = 2**17  # log-probabilities of a whole response, over all prompts
_MANY_LOGPROBS = 2**9


class ClientGone(Exception):
    """The client has disconnected before its response."""


class ApiFormat(Protocol):
    """Writes an answer in the format of an API; one object per HTTP request."""

    def field_name(self, name: str) -> str:
        """Return the API's name for one of the engine's fields."""

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the completions of all prompts as one object. Raises ApiError."""

    def events(self, prompt: int, chunk: Chunk) -> bytes:
        """Return the events for a chunk of one of the prompts; none is empty. Raises ApiError."""

    def end(self) -> bytes:
        """Return the last events."""

    def failure(self, error: ApiError) -> bytes:
        """Return the last events after an error."""


class GatewayResponse:
    """The response to one HTTP request; ``streams`` has the chunks of each of its prompts."""

    def __init__(self, response_format: ApiFormat, streams: Sequence[Chunks]) -> None:
        self._format = response_format
        self._streams = streams

    async def whole(self) -> Json:
        """Return the response as one JSON object. Raises ApiError."""
        builders = [CompletionBuilder() for _ in self._streams]
        num_logprobs = 0
        try:
            async with Backlog(self._streams, math.inf) as chunks:
                async for prompt, chunk in chunks:
                    num_logprobs += _num_logprobs(chunk)
                    if num_logprobs > MAX_LOGPROBS:
                        raise _too_many_logprobs()
                    builders[prompt].add(chunk)
        except ClientError as error:
            raise self._refusal(error) from None
        completions = [builder.build() for builder in builders]
        if num_logprobs > _MANY_LOGPROBS:  # must not block the event loop
            return await asyncio.to_thread(self._format.whole, completions)
        return self._format.whole(completions)

    async def events(self, max_backlog: int) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events.

        Raises ApiError before the first event; later errors are sent as an event.
        """
        has_begun = False
        try:
            async with Backlog(self._streams, max_backlog) as chunks:
                async for prompt, chunk in chunks:
                    events = self._format.events(prompt, chunk)
                    if events:
                        has_begun = True
                        yield events
            end = self._format.end()
        except (ApiError, ClientError) as error:
            refusal = self._refusal(error)
            if not has_begun:
                raise refusal from None
            end = self._format.failure(refusal)
        yield end

    def _refusal(self, error: ApiError | ClientError) -> ApiError:
        if isinstance(error, ApiError):
            return error
        return ApiError.from_client(error, self._format.field_name)


class EventStream(StreamingResponse):
    """A response of server-sent events.

    The caller passes the first event in. The stream stops when the client disconnects."""

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


async def respond(request: Request, response: GatewayResponse, *, stream: bool) -> Response:
    """Return the HTTP response. Raises ApiError, or ClientGone if the client left."""
    if not stream:
        content = await while_connected(request, response.whole())
        return Response(to_json(content), media_type="application/json")
    events = response.events(request.app.state.options.max_stream_backlog)
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


def _too_many_logprobs() -> ApiError:
    return ApiError.field(
        "logprobs", f"a whole answer has at most {MAX_LOGPROBS} in all; stream it"
    )


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
