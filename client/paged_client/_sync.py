"""The client for threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2_grpc

from paged_client._completion import CompletionBuilder
from paged_client._errors import from_status
from paged_client._protocol import (
    CHANNEL_OPTIONS,
    READY_TIMEOUT_S,
    Prompt,
    StreamDecoder,
    ready_request,
    stream_request,
)
from paged_client._types import Chunk, Completion


class Stream(Iterator[Chunk]):
    """The chunks of one request as they arrive.

    Leaving its ``with`` block, or dropping it, before the end cancels the request on the server.
    Iterating raises ClientError's subclasses; ``cancel`` may be called from any thread.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._decoder = StreamDecoder()
        self._pending: deque[Chunk] = deque()

    def __next__(self) -> Chunk:
        while not self._pending:
            self._pending.extend(self._decoder.decode(self._next_response()))
        return self._pending.popleft()

    def cancel(self) -> None:
        """Cancel the request on the server; the iterator raises RequestCancelled."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def _next_response(self) -> Any:
        try:
            return next(self._call)
        except StopIteration:
            self._decoder.finish()
            raise
        except grpc.RpcError as error:
            raise from_status(error) from None


class Client:
    """Talks to one model of a server; any number of requests at once, from any thread.

    ``timeout`` is in seconds, for a whole request; None waits for ever.
    """

    def __init__(
        self, url: str = "127.0.0.1:8001", model: str = "paged_llm", timeout: float | None = None
    ) -> None:
        self._model = model
        self._timeout = timeout
        self._channel = grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **params: Any) -> Stream:
        """Send a prompt, a text or token ids, with sampling options such as ``max_tokens=64``."""
        request = stream_request(self._model, prompt, params)
        call = self._stub.ModelStreamInfer(
            iter((request,)), timeout=self._timeout if timeout is None else timeout
        )
        return Stream(call)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **params: Any
    ) -> Completion:
        """Send a prompt and wait for the whole answer."""
        builder = CompletionBuilder()
        with self.stream(prompt, timeout=timeout, **params) as stream:
            for chunk in stream:
                builder.add(chunk)
        return builder.build()

    def is_ready(self) -> bool:
        """Whether the server is there and the model takes requests."""
        try:
            answer = self._stub.ModelReady(ready_request(self._model), timeout=READY_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    def close(self) -> None:
        """Cancel what is still open and let go of the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
