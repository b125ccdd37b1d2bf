"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2_grpc

from paged_client._completion import CompletionBuilder
from paged_client._errors import RequestCancelled, from_status
from paged_client._protocol import (
    CHANNEL_OPTIONS,
    READY_TIMEOUT_S,
    Prompt,
    StreamDecoder,
    ready_request,
    stream_request,
)
from paged_client._types import Chunk, Completion


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of one request as they arrive.

    Leaving its ``async with`` block, ``aclose`` or the cancellation of the task that waits for a
    chunk cancels the request on the server. Iterating raises ClientError's subclasses.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._decoder = StreamDecoder()
        self._pending: deque[Chunk] = deque()
        self._cancelled = False

    async def __anext__(self) -> Chunk:
        while not self._pending:
            self._pending.extend(self._decoder.decode(await self._next_response()))
        return self._pending.popleft()

    def cancel(self) -> None:
        """Cancel the request on the server; the iterator raises RequestCancelled."""
        self._cancelled = True
        self._call.cancel()

    async def aclose(self) -> None:
        """Cancel the request on the server if it has not ended."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()

    async def _next_response(self) -> Any:
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            # gRPC raises this for a cancelled call as well as for a cancelled task.
            if self._cancelled:
                raise RequestCancelled("cancelled") from None
            self.cancel()
            raise
        except grpc.RpcError as error:
            raise from_status(error) from None
        if response is grpc.aio.EOF:
            self._decoder.finish()
            raise StopAsyncIteration
        return response


class AsyncClient:
    """Talks to one model of a server from one event loop, inside which it has to be made.

    ``timeout`` is in seconds, for a whole request; None waits for ever.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", model: str = "paged_llm", timeout: float | None = None
    ) -> None:
        self._model = model
        self._timeout = timeout
        self._channel = grpc.aio.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **params: Any) -> AsyncStream:
        """Send a prompt, a text or token ids, with sampling options such as ``max_tokens=64``."""
        request = stream_request(self._model, prompt, params)
        call = self._stub.ModelStreamInfer(
            iter((request,)), timeout=self._timeout if timeout is None else timeout
        )
        return AsyncStream(call)

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **params: Any
    ) -> Completion:
        """Send a prompt and wait for the whole answer."""
        builder = CompletionBuilder()
        async with self.stream(prompt, timeout=timeout, **params) as stream:
            async for chunk in stream:
                builder.add(chunk)
        return builder.build()

    async def is_ready(self) -> bool:
        """Whether the server is there and the model takes requests."""
        request = ready_request(self._model)
        try:
            answer = await self._stub.ModelReady(request, timeout=READY_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    async def aclose(self) -> None:
        """Cancel what is still open and let go of the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
