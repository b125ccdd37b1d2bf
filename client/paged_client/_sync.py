"""The client for threads."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import grpc

from paged_client._base import BaseClient, only_response
from paged_client._calls import Call, Canceller
from paged_client._completion import CompletionBuilder
from paged_client._types import Chunk, Completion, Embedding, EngineView, ModelInfo, Score
from paged_client.errors import from_status
from paged_client.protocol import (
    READY_TIMEOUT_S,
    Prompt,
    StreamDecoder,
    Tools,
    adapter_request,
    channel_options,
    check_done,
    decode_embedding,
    decode_info,
    decode_score,
    decode_text,
    decode_token_ids,
    decode_view,
    embedding_request,
    give_name,
    ready_request,
    score_request,
    stream_request,
    task_request,
)


class Stream(Iterator[Chunk]):
    """The chunks of one request as they arrive.

    Leaving the ``with`` block or dropping the stream before its end cancels the request on the
    server. Iterating raises subclasses of ClientError; ``cancel`` may be called from any thread.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._decoder = StreamDecoder()
        self._pending: deque[Chunk] = deque()

    def __next__(self) -> Chunk:
        while not self._pending:
            response = self._call.read()
            if response is None:
                self._decoder.finish()
                raise StopIteration
            self._pending.extend(self._decoder.decode(response))
        return self._pending.popleft()

    def cancel(self) -> None:
        """Cancel the request on the server; the iterator raises RequestCancelled.

        This does not wait for the server; ``Client.close`` does.
        """
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # no thread can start then; gRPC cancels the call by itself
            self.cancel()


class Client(BaseClient):
    """Client of one model on a server; any thread may send any number of concurrent requests.

    ``timeout`` is in seconds, for a whole request; None waits forever.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", model: str = "paged_llm", timeout: float | None = None
    ) -> None:
        super().__init__(grpc.insecure_channel(url, options=channel_options(url)), model, timeout)
        self._canceller = Canceller(self._stub, model)

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        add_special_tokens: bool = True,
        whole: bool = False,
        parsed: bool | None = None,
        **params: Any,
    ) -> Stream:
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
        name = give_name(request)
        return Stream(Call(self._call(request, timeout), name, self._canceller))

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **params: Any
    ) -> Completion:
        """Send a prompt and wait until all of its completions have ended."""
        builder = CompletionBuilder()
        with self.stream(prompt, timeout=timeout, **params) as stream:
            for chunk in stream:
                builder.add(chunk)
        return builder.build()

    def embed(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        add_special_tokens: bool = True,
        **params: Any,
    ) -> Embedding:
        """Return the embedding of a prompt; ``dimensions=64`` keeps only its first numbers.

        ``params`` may have ``dimensions``, and parameters of all requests such as ``priority``.
        """
        request = embedding_request(
            self._model, prompt, params, add_special_tokens=add_special_tokens
        )
        return decode_embedding(self._answer(request, timeout))

    def score(
        self, text: str, text_pair: str, *, timeout: float | None = None, **params: Any
    ) -> Score:
        """Return the score of a pair of texts, such as a query and a document, by a reranker.

        ``params`` may have parameters of all requests such as ``priority``.
        """
        request = score_request(self._model, text, text_pair, params)
        return decode_score(self._answer(request, timeout))

    def tokenize(
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
        return decode_token_ids(self._answer(request))

    def detokenize(
        self, token_ids: Sequence[int], *, tenant: str | None = None, is_prompt: bool = False
    ) -> str:
        """Return the text of token ids, including special tokens, on behalf of a tenant.

        With ``is_prompt`` it is the text to which an answer's text can be joined: a character that
        is not complete at the end is left out, because the answer begins with it.
        """
        request = task_request(
            "detokenize", self._model, token_ids, tenant=tenant, is_prompt=is_prompt
        )
        return decode_text(self._answer(request))

    def info(self) -> ModelInfo:
        """Return the model's properties."""
        return decode_info(self._answer(task_request("info", self._model)))

    def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load a LoRA adapter, so that requests can name it with ``lora_name``.

        It must be in the folder of the engine's option ``runtime_lora_folder``; ``path`` may be
        relative to it. With ``in_place`` it may replace an adapter of this name.
        """
        request = adapter_request(self._model, name, path, in_place=in_place)
        check_done(self._answer(request))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter: no more requests can name it. Returns when its requests ended."""
        check_done(self._answer(adapter_request(self._model, name)))

    def inspect(self) -> EngineView:
        """Return the engine's sequences and blocks; requires its option ``enable_inspect``."""
        return decode_view(self._answer(task_request("inspect", self._model)))

    def is_ready(self) -> bool:
        """Return True if the server is reachable and the model accepts requests."""
        try:
            answer = self._stub.ModelReady(ready_request(self._model), timeout=READY_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    def close(self) -> None:
        """Cancel open requests and close the connection."""
        self._canceller.wait()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, request: Any, timeout: float | None = None) -> Any:
        """Return the only response to a task; like Stream, reads to the end of the call."""
        try:
            return only_response(list(self._call(request, timeout)))
        except grpc.RpcError as error:
            raise from_status(error) from None
