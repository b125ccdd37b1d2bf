"""Transports that send requests under gevent, one class per protocol.

The endpoints of the bench do the same under asyncio, which gRPC does not support under gevent.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar

import grpc
import urllib3
from gevent import GreenletExit
from grpc.experimental.gevent import init_gevent
from paged_client import Client, ClientError
from paged_client.errors import from_status
from paged_client.protocol import channel_options, index_request, ready_request
from tritonclient.grpc import service_pb2_grpc

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten
from paged_loadtest.destination import PROBE_TIMEOUT_S, Destination, ServerInfo
from paged_loadtest.locust_options import LocustOptions
from paged_loadtest.locust_statistics import CUT_OFF
from paged_loadtest.options import address_of
from paged_loadtest.protocols import openai, triton_grpc, triton_http
from paged_loadtest.protocols.decoding import ResponseDecoder, describe_refusal
from paged_loadtest.timeline import Timeline

_MAX_CONNECTIONS = 10_000  # kept open for reuse; more can be open at once
_JSON = {"Content-Type": "application/json"}


class ConnectionLost(Exception):
    """Raised when a connection fails, or is closed in the middle of a request."""


class Transport(ABC):
    """A connection to one server over one protocol, usable by any number of greenlets at once."""

    name: ClassVar[str]  # label in the statistics
    option: ClassVar[str]  # field of LocustOptions that sets its address
    is_grpc: ClassVar[bool] = False
    decoder_type: ClassVar[type[ResponseDecoder[Any]]]

    def __init__(self, options: LocustOptions) -> None:
        self.address, default = (
            address_of(getattr(each, self.option), is_grpc=self.is_grpc)
            for each in (options, LocustOptions())
        )
        self.has_default_address = self.address == default
        self.flag = "--" + self.option.replace("_", "-")
        self.model = options.model
        self.destination = Destination(
            self.address,
            self.model,
            nobody=f"{self.flag}: nobody answers",
            advice="give its address, or name the user classes to run without this one",
        )

    def send(self, request: WorkloadRequest) -> tuple[Timeline, bool]:
        """Send a request; return its timeline, and whether it failed because the connection did.

        Killing the greenlet cancels the request; the tokens received so far are kept.
        """
        message = self.encode(request)
        decoder = self.decoder_type(Timeline(perf_counter()))
        is_lost = False
        try:
            self.stream(request, message, decoder)
        except ConnectionLost as error:
            is_lost = True
            decoder.fail(str(error))
        except GreenletExit:
            decoder.fail(CUT_OFF)
        decoder.finish()
        return decoder.timeline, is_lost

    @abstractmethod
    def check(self) -> ServerInfo:
        """Check that the server answers and has the model.

        Raises:
            ConfigError: it does not answer, or lacks the model; the message says what to do.
        """

    @abstractmethod
    def encode(self, request: WorkloadRequest) -> Any:
        """Encode a request for this protocol."""

    @abstractmethod
    def stream(self, request: WorkloadRequest, message: Any, decoder: ResponseDecoder[Any]) -> None:
        """Send a message and feed the response to the decoder.

        Raises:
            ConnectionLost: the connection failed or was closed early.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class GrpcWire(Transport):
    """Triton's gRPC: one stream per request, all over one connection."""

    name = "gRPC"
    option = "grpc_url"
    is_grpc = True
    decoder_type = triton_grpc.TritonGrpcDecoder

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        init_gevent()  # not at import: --processes forks the workers after it
        self._channel = grpc.insecure_channel(self.address, options=channel_options(self.address))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def check(self) -> ServerInfo:
        """Check the model, and read its limits if it is one of ours."""
        try:
            if not self._stub.ModelReady(ready_request(self.model), timeout=PROBE_TIMEOUT_S).ready:
                index = self._stub.RepositoryIndex(index_request(), timeout=PROBE_TIMEOUT_S)
                raise self.destination.unknown_model(model.name for model in index.models)
        except grpc.RpcError as error:
            raise self.destination.unreachable(str(from_status(error))) from error
        try:
            with Client(self.address, self.model, timeout=PROBE_TIMEOUT_S) as client:
                info = client.info()
        except ClientError:  # another server's model
            return ServerInfo("triton")
        return ServerInfo("triton", info.vocab_size, info.max_model_len)

    def encode(self, request: WorkloadRequest) -> Any:
        return triton_grpc.encode(request, self.model)

    def stream(self, request: WorkloadRequest, message: Any, decoder: ResponseDecoder[Any]) -> None:
        call = self._stub.ModelStreamInfer(iter((message,)))
        try:
            for response in call:
                decoder.feed(response, perf_counter())
        except grpc.RpcError as error:
            raise ConnectionLost(str(from_status(error))) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the channel; without this the process would not exit."""
        self._channel.close()


class HttpWire(Transport):
    """Base of the HTTP transports: posts a body and reads a stream of events."""

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        self._headers = _JSON
        try:
            self._pool = urllib3.connection_from_url(
                self.address, maxsize=_MAX_CONNECTIONS, block=False, retries=False, timeout=None
            )
        except urllib3.exceptions.HTTPError as error:
            raise ConfigError(f"{self.flag}: must be a URL, got {shorten(self.address)}") from error

    @abstractmethod
    def path(self, request: WorkloadRequest) -> str:
        """Return the path to post the request to."""

    def stream(self, request: WorkloadRequest, message: Any, decoder: ResponseDecoder[Any]) -> None:
        with (
            _connection_errors(),
            self._pool.urlopen(
                "POST",
                self.path(request),
                body=message,
                headers=self._headers,
                preload_content=False,
            ) as response,
        ):
            if response.status != 200:
                decoder.fail(describe_refusal(response.status, response.read()))
                return
            for data in response.stream(None):
                decoder.feed(data, perf_counter())

    def close(self) -> None:
        self._pool.close()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of a short response (None if the body is not JSON).

        Raises:
            ConfigError: the server does not answer.
        """
        try:
            with _connection_errors():
                reply = self._pool.urlopen(
                    method,
                    path,
                    body=None if body is None else json.dumps(body),
                    headers=self._headers,
                    timeout=PROBE_TIMEOUT_S,
                )
        except ConnectionLost as error:
            raise self.destination.unreachable(str(error)) from error
        try:
            return reply.status, json.loads(reply.data)
        except ValueError:
            return reply.status, None


class GenerateStreamWire(HttpWire):
    """Triton's HTTP ``generate_stream``."""

    name = "HTTP"
    option = "http_url"
    decoder_type = triton_http.TritonHttpDecoder

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        self._path = triton_http.model_path(self.model)

    def check(self) -> ServerInfo:
        """Check the model, and read its limits if it is one of ours."""
        status, _ = self.ask("GET", "/v2")
        if status != 200:
            raise self.destination.unreachable(f"HTTP {status} for /v2")
        if self.ask("GET", f"{self._path}/ready")[0] != 200:
            _, index = self.ask("POST", "/v2/repository/index", {"ready": True})
            raise self.destination.unknown_model(model["name"] for model in index)
        status, answer = self.ask("POST", f"{self._path}/generate", {"task": "info"})
        if status != 200:  # another server's model
            return ServerInfo("triton")
        return triton_http.server_info("triton", answer)

    def path(self, request: WorkloadRequest) -> str:
        return f"{self._path}/generate_stream"

    def encode(self, request: WorkloadRequest) -> bytes:
        return triton_http.encode(request, self.model)


class OpenAIWire(HttpWire):
    """OpenAI's completions API, or chat completions for chat requests."""

    name = "OpenAI"
    option = "openai_url"
    decoder_type = openai.OpenAIDecoder

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        self._headers = _JSON | openai.authorization()

    def check(self) -> ServerInfo:
        """Check that the server lists the model, and read its limits."""
        card = openai.find_model(self.destination, *self.ask("GET", openai.MODELS))
        return ServerInfo("openai", card.get("vocab_size"), card.get("max_model_len"))

    def path(self, request: WorkloadRequest) -> str:
        return openai.CHATS if _is_chat(request) else openai.COMPLETIONS

    def encode(self, request: WorkloadRequest) -> bytes:
        return openai.encode(request, self.model, chat=_is_chat(request))


def _is_chat(request: WorkloadRequest) -> bool:
    return not isinstance(request.prompt, str) and isinstance(request.prompt[0], dict)


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ConnectionLost(str(error) or type(error).__name__) from error
