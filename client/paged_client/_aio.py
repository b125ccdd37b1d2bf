"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import grpc

from paged_client._base import BaseClient, only_response
from paged_client._calls import AsyncCall, AsyncCanceller
from paged_client._completion import CompletionBuilder
from paged_client._types import Chunk, Completion, Embedding, EngineView, ModelInfo, Score
from paged_client.errors import from_status
from paged_client.protocol import (
    READY_TIMEOUT_S,
    Prompt,
    SingleDecoder,
    StreamDecoder,
    Tools,
    adapter_request,
    channel_options,
    check_done,
    config_request,
    decode_embedding,
    decode_info,
    decode_score,
    decode_text,
    decode_token_ids,
    decode_view,
    embedding_request,
    give_name,
    index_request,
    is_large,
    ready_request,
    score_request,
    speaks_this_contract,
    stream_request,
    task_request,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Decoder(Protocol[T_co]):
    """Converts the responses of one stream."""

    def decode(self, response: Any) -> Sequence[T_co]:
        """Convert a response. Raises ClientError."""
        ...

    def finish(self) -> None:
        """Check the end of the stream. Raises ServerError."""
        ...


class AsyncStream(AsyncIterator[T_co]):
    """The chunks of one request as they arrive, or its embedding or score.

    The request is cancelled on the server by ``aclose``, by leaving the ``async with`` block, or by
    cancelling the task that waits for a chunk. Iterating raises subclasses of ClientError.
    """

    def __init__(self, call: AsyncCall, decoder: Decoder[T_co]) -> None:
        self._call = call
        self._decoder = decoder
        self._pending: deque[T_co] = deque()

    async def __anext__(self) -> T_co:
        while not self._pending:
            response = await self._call.read()
            if response is None:
                self._decoder.finish()
                raise StopAsyncIteration
            if is_large(response):  # must not block the event loop
                self._pending.extend(await asyncio.to_thread(self._decoder.decode, response))
            else:
                self._pending.extend(self._decoder.decode(response))
        return self._pending.popleft()

    def cancel(self) -> None:
        """Cancel the request on the server; the iterator raises RequestCancelled.

        This does not wait for the server; ``AsyncClient.aclose`` does.
        """
        self._call.cancel()

    async def abort(self) -> None:
        """Ask the server to end the request; the last chunks have the finish reason ``abort``.

        The iterator goes on, unlike after ``cancel``.
        """
        await self._call.abort()

    async def aclose(self) -> None:
        """Cancel the request on the server if it has not ended."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.cancel()


class AsyncClient(BaseClient):
    """Client of one model on a server; must be created and used inside one event loop.

    ``timeout`` is in seconds, for a whole request; None waits forever.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", model: str = "paged_llm", timeout: float | None = None
    ) -> None:
        super().__init__(
            grpc.aio.insecure_channel(url, options=channel_options(url)), model, timeout
        )
        self._canceller = AsyncCanceller(self._stub, model)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        add_special_tokens: bool = True,
        whole: bool = False,
        parsed: bool | None = None,
        **params: Any,
    ) -> AsyncStream[Chunk]:
        """Send a prompt with sampling options such as ``max_tokens=64``.

        The prompt is a text, token ids, or chat messages for the model's template.
        ``add_special_tokens`` applies to texts; ``whole`` requests one response at the end.
        ``parsed`` asks for reasoning and tool calls apart from the text; by default, requests with
        ``tools`` do. ``tools``, ``tool_choice`` and ``parallel_tool_calls`` are OpenAI's.
        """
        request = stream_request(
            self._model,
            prompt,
            params,
            whole=whole,
            add_special_tokens=add_special_tokens,
            parsed=parsed,
        )
        return self._stream(request, timeout, StreamDecoder())

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **params: Any
    ) -> Completion:
        """Send a prompt and wait until all of its completions have ended."""
        builder = CompletionBuilder()
        async with self.stream(prompt, timeout=timeout, **params) as stream:
            async for chunk in stream:
                builder.add(chunk)
        return builder.build()

    def stream_embedding(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        add_special_tokens: bool = True,
        **params: Any,
    ) -> AsyncStream[Embedding]:
        """Send a prompt. The stream yields the prompt's embedding, and can be canceled before.

        ``params`` may have ``dimensions``, and parameters of all requests such as ``priority``.
        """
        request = embedding_request(
            self._model, prompt, params, add_special_tokens=add_special_tokens
        )
        return self._stream(request, timeout, SingleDecoder(decode_embedding))

    async def embed(
        self, prompt: Prompt, *, timeout: float | None = None, **params: Any
    ) -> Embedding:
        """Return the embedding of a prompt; ``dimensions=64`` keeps only its first numbers."""
        async with self.stream_embedding(prompt, timeout=timeout, **params) as stream:
            (embedding,) = [item async for item in stream]
        return embedding

    def stream_score(
        self, text: str, text_pair: str, *, timeout: float | None = None, **params: Any
    ) -> AsyncStream[Score]:
        """Send a pair of texts; the stream has its score only, and can be canceled until then."""
        request = score_request(self._model, text, text_pair, params)
        return self._stream(request, timeout, SingleDecoder(decode_score))

    async def score(
        self, text: str, text_pair: str, *, timeout: float | None = None, **params: Any
    ) -> Score:
        """Return the score of a pair of texts, such as a query and a document, by a reranker."""
        async with self.stream_score(text, text_pair, timeout=timeout, **params) as stream:
            (score,) = [item async for item in stream]
        return score

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        tenant: str | None = None,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt. The request counts against the tenant's rate limit.

        Chat messages are tokenized with the ``tools`` that the model may call.
        """
        request = task_request(
            "tokenize",
            self._model,
            prompt,
            add_special_tokens=add_special_tokens,
            tenant=tenant,
            tool_options={"tools": tools, "tool_choice": tool_choice},
        )
        return decode_token_ids(await self._answer(request))

    async def detokenize(
        self, token_ids: Sequence[int], *, tenant: str | None = None, is_prompt: bool = False
    ) -> str:
        """Return the text of token ids, including special tokens, on behalf of a tenant.

        With ``is_prompt`` it is the text to which an answer's text can be joined: a character that
        is not complete at the end is left out, because the answer begins with it.
        """
        request = task_request(
            "detokenize", self._model, token_ids, tenant=tenant, is_prompt=is_prompt
        )
        return decode_text(await self._answer(request))

    async def info(self) -> ModelInfo:
        """Return the model's properties."""
        return decode_info(await self._answer(task_request("info", self._model)))

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load a LoRA adapter, so that requests can name it with ``lora_name``.

        It must be in the folder of the engine's option ``runtime_lora_folder``; ``path`` may be
        relative to it. With ``in_place`` it may replace an adapter of this name.
        """
        request = adapter_request(self._model, name, path, in_place=in_place)
        check_done(await self._answer(request))

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter: no more requests can name it. Returns when its requests ended."""
        check_done(await self._answer(adapter_request(self._model, name)))

    async def inspect(self) -> EngineView:
        """Return the engine's sequences and blocks; requires its option ``enable_inspect``."""
        return decode_view(await self._answer(task_request("inspect", self._model)))

    async def models(self) -> tuple[str, ...]:
        """Return the names of the server's ready models that this library supports."""
        try:
            index = await self._stub.RepositoryIndex(index_request(), timeout=READY_TIMEOUT_S)
            names = sorted({model.name for model in index.models})
            configs = [
                await self._stub.ModelConfig(config_request(name), timeout=READY_TIMEOUT_S)
                for name in names
            ]
        except grpc.RpcError as error:
            raise from_status(error) from None
        return tuple(
            name
            for name, config in zip(names, configs, strict=True)
            if speaks_this_contract(config)
        )

    async def is_ready(self) -> bool:
        """Return True if the server is reachable and the model accepts requests."""
        request = ready_request(self._model)
        try:
            answer = await self._stub.ModelReady(request, timeout=READY_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    async def aclose(self) -> None:
        """Cancel open requests and close the connection."""
        await self._canceller.wait()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def _stream(self, request: Any, timeout: float | None, decoder: Decoder[T]) -> AsyncStream[T]:
        name = give_name(request)
        return AsyncStream(AsyncCall(self._call(request, timeout), name, self._canceller), decoder)

    async def _answer(self, request: Any) -> Any:
        """Return the only response to a task; like AsyncStream, reads to the end of the call."""
        try:
            return only_response([response async for response in self._call(request, None)])
        except grpc.RpcError as error:
            raise from_status(error) from None
