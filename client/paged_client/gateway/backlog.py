"""Buffers chunks between the servers and a client that may read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Self

from paged_client import Chunk
from paged_client.gateway.errors import ApiError

MAX_STARTING = 16  # requests to servers that wait for their first chunk at once, per HTTP request


class Backlog(AsyncIterator[tuple[int, Chunk]]):
    """The chunks of several requests to servers as they arrive, each with its request's index.

    Each of ``streams`` yields the chunks of one request. At most ``MAX_STARTING`` requests wait for
    their first chunk; the next request starts when one of them receives it or ends. After an error
    no further request starts.

    Waiting chunks of one completion are merged. If more than ``limit`` tokens wait for the reader,
    all requests are cancelled, the waiting chunks are dropped, and the reader gets an ApiError.
    Leaving the ``async with`` block cancels the requests that are still open.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[Chunk, None]], limit: float) -> None:
        self._limit = limit
        self._waiting: dict[tuple[int, int], Chunk] = {}  # by (request, completion) index
        self._num_tokens = 0
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._starting = asyncio.Semaphore(MAX_STARTING)
        self._num_open = len(streams)
        self._pumps = [
            asyncio.create_task(self._pump(number, stream)) for number, stream in enumerate(streams)
        ]

    async def __anext__(self) -> tuple[int, Chunk]:
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        number, answer = next(iter(self._waiting))
        chunk = self._waiting.pop((number, answer))
        self._num_tokens -= chunk.num_output_tokens
        return number, chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._cancel()

    async def _pump(self, number: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(stream):
                first = await self._start(stream)
                if first is not None:
                    self._put(number, first)
                    async for chunk in stream:
                        self._put(number, chunk)
        except Exception as error:  # raised to the reader by __anext__
            self._error = self._error or error
        self._num_open -= 1
        self._changed.set()

    async def _start(self, stream: AsyncGenerator[Chunk, None]) -> Chunk | None:
        """Wait for a turn and return the first chunk; None without one or after an error."""
        async with self._starting:
            if self._error is not None:
                return None
            try:
                return await anext(stream, None)
            except Exception as error:
                self._error = self._error or error  # before the next request starts
                raise

    def _put(self, number: int, chunk: Chunk) -> None:
        key = number, chunk.index
        before = self._waiting.get(key)
        self._waiting[key] = chunk if before is None else _joined(before, chunk)
        self._num_tokens += chunk.num_output_tokens
        if self._num_tokens > self._limit:
            self._waiting.clear()
            self._error = _too_slow(self._num_tokens)
            self._cancel()
        self._changed.set()

    def _cancel(self) -> None:
        for pump in self._pumps:
            pump.cancel()


def _joined(first: Chunk, second: Chunk) -> Chunk:
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        num_output_tokens=first.num_output_tokens + second.num_output_tokens,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _too_slow(num_tokens: int) -> ApiError:
    message = f"stream_backlog: {num_tokens} tokens waited for their reader; the answer was ended"
    return ApiError(408, message, code="stream_backlog")
