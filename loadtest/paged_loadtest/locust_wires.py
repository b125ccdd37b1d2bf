"""Transports that send requests under gevent, one class per protocol.

The endpoints of the bench do the same under asyncio, which gRPC does not support under gevent.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar
from urllib.parse import quote

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
from paged_loadtest.endpoints.endpoint import PROBE_TIMEOUT_S, ServerInfo
from paged_loadtest.endpoints.openai import KEY_VARIABLE
from paged_loadtest.locust_options import LocustOptions
from paged_loadtest.locust_statistics import CUT_OFF
from paged_loadtest.protocols import openai, triton_grpc, triton_http
from paged_loadtest.protocols.decoding import ResponseDecoder, describe_refusal
from paged_loadtest.timeline import Timeline

_MAX_CONNECTIONS = 10_000  # kept open for reuse; more can be open at once
_JSON = {"Content-Type": "application/json"}


class Unreachable(ConfigError):
    """Raised when an address does not answer, or not in the expected protocol."""


class ConnectionLost(Exception):
    """Raised when a connection fails, or is closed in the middle of a request."""


class Transport(ABC):
    """A connection to one server over one protocol, usable by any number of greenlets at once."""

    name: ClassVar[str]  # label in the statistics
    flag: ClassVar[str]  # the option that sets its address

    def __init__(self, options: LocustOptions) -> None:
        self.address = self.find_address(options)
        self.model = options.model

    def send(self, request: WorkloadRequest) -> tuple[Timeline, bool]:
        """Send a request; return its timeline, and whether it failed because the connection did.

        Killing the greenlet cancels the request; the tokens received so far are kept.
        """
        message = self.encode(request)
        decoder = self.decoder(request, Timeline(perf_counter()))
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
    def find_address(self, options: LocustOptions) -> str:
        """Return the server's address."""

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
    def decoder(self, request: WorkloadRequest, timeline: Timeline) -> ResponseDecoder[Any]:
        """Create a decoder that writes the response into ``timeline``."""

    @abstractmethod
    def stream(self, request: WorkloadRequest, message: Any, decoder: ResponseDecoder[Any]) -> None:
        """Send a message and feed the response to the decoder.

        Raises:
            ConnectionLost: the connection failed or was closed early.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def has_default_address(self) -> bool:
        """Return True if the address is the default one."""
        return self.address == self.find_address(LocustOptions())

    def unreachable(self, reason: str) -> Unreachable:
        """Create the error for an address that does not answer, or not in this protocol."""
        return Unreachable(
            f"{self.flag}: nobody answers at {self.address} "
            f"({shorten(reason, 160, quote=False)}); start the server, give its address, or name "
            "the user classes to run without this one"
        )

    def unknown_model(self, known: Iterable[str]) -> ConfigError:
        """Create the error for a server that answers but lacks the model."""
        names = ", ".join(sorted(known)) or "none"
        return ConfigError(
            f"--model: {self.address} has no model {shorten(self.model)} that is ready; "
            f"ready there: {names}"
        )


class GrpcWire(Transport):
    """Triton's gRPC: one stream per request, all over one connection."""

    name = "gRPC"
    flag = "--grpc-url"

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        init_gevent()  # not at import: --processes forks the workers after it
        self._channel = grpc.insecure_channel(self.address, options=channel_options(self.address))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def find_address(self, options: LocustOptions) -> str:
        """Return the address as ``host:port``."""
        return options.grpc_url.rpartition("://")[2]

    def check(self) -> ServerInfo:
        """Check the model, and read its limits if it is one of ours."""
        try:
            if not self._stub.ModelReady(ready_request(self.model), timeout=PROBE_TIMEOUT_S).ready:
                index = self._stub.RepositoryIndex(index_request(), timeout=PROBE_TIMEOUT_S)
                raise self.unknown_model(model.name for model in index.models)
        except grpc.RpcError as error:
            raise self.unreachable(str(from_status(error))) from error
        try:
            with Client(self.address, self.model, timeout=PROBE_TIMEOUT_S) as client:
                info = client.info()
        except ClientError:  # another server's model
            return ServerInfo("triton")
        return ServerInfo("triton", info.vocab_size, info.max_model_len)

    def encode(self, request: WorkloadRequest) -> Any:
        """Encode as a ``ModelInferRequest``."""
        return triton_grpc.encode(request, self.model)

    def decoder(self, request: WorkloadRequest, timeline: Timeline) -> ResponseDecoder[Any]:
        """Create a decoder of ``ModelStreamInferResponse`` messages."""
        return triton_grpc.TritonGrpcDecoder(timeline)

    def stream(self, request: WorkloadRequest, message: Any, decoder: ResponseDecoder[Any]) -> None:
        """Send a message and feed the responses to the decoder."""
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
        """Post a body and feed the response to the decoder."""
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
        """Close the connections."""
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
            raise self.unreachable(str(error)) from error
        try:
            return reply.status, json.loads(reply.data)
        except ValueError:
            return reply.status, None


class GenerateStreamWire(HttpWire):
    """Triton's HTTP ``generate_stream``."""

    name = "HTTP"
    flag = "--http-url"

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        self._path = f"/v2/models/{quote(self.model, safe='')}"

    def find_address(self, options: LocustOptions) -> str:
        """Return the base URL."""
        return _base_url(options.http_url)

    def check(self) -> ServerInfo:
        """Check the model, and read its limits if it is one of ours."""
        status, _ = self.ask("GET", "/v2")
        if status != 200:
            raise self.unreachable(f"HTTP {status} for /v2")
        if self.ask("GET", f"{self._path}/ready")[0] != 200:
            _, index = self.ask("POST", "/v2/repository/index", {"ready": True})
            raise self.unknown_model(model["name"] for model in index)
        status, answer = self.ask("POST", f"{self._path}/generate", {"task": "info"})
        if status != 200:  # another server's model
            return ServerInfo("triton")
        info = json.loads(answer["text_output"])
        return ServerInfo("triton", info["vocab_size"], info["max_model_len"])

    def path(self, request: WorkloadRequest) -> str:
        """Return the ``generate_stream`` path of the model."""
        return triton_http.path(self.model)

    def encode(self, request: WorkloadRequest) -> bytes:
        """Encode the input tensors as a JSON body."""
        return triton_http.encode(request, self.model)

    def decoder(self, request: WorkloadRequest, timeline: Timeline) -> ResponseDecoder[Any]:
        """Create a decoder of the response body."""
        return triton_http.TritonHttpDecoder(timeline)


class OpenAIWire(HttpWire):
    """OpenAI's completions API, or chat completions for chat requests."""

    name = "OpenAI"
    flag = "--openai-url"

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        if key := os.environ.get(KEY_VARIABLE):
            self._headers = _JSON | {"Authorization": f"Bearer {key}"}

    def find_address(self, options: LocustOptions) -> str:
        """Return the base URL, without the ``/v1`` that OpenAI clients append."""
        return _base_url(options.openai_url.rstrip("/").removesuffix("/v1"))

    def check(self) -> ServerInfo:
        """Check that the server lists the model, and read its limits."""
        status, answer = self.ask("GET", "/v1/models")
        if status in (401, 403):
            raise ConfigError(f"{KEY_VARIABLE}: {self.address} wants an API key; set it")
        if status != 200 or not isinstance(answer, dict) or "data" not in answer:
            raise self.unreachable(f"HTTP {status} for /v1/models")
        cards = {card["id"]: card for card in answer["data"]}
        if self.model not in cards:
            raise self.unknown_model(cards)
        card = cards[self.model]
        return ServerInfo("openai", card.get("vocab_size"), card.get("max_model_len"))

    def path(self, request: WorkloadRequest) -> str:
        """Return the chat completions path for chats, else the completions path."""
        return openai.CHATS if _is_chat(request) else openai.COMPLETIONS

    def encode(self, request: WorkloadRequest) -> bytes:
        """Encode as an OpenAI request body."""
        return openai.encode(request, self.model, chat=_is_chat(request))

    def decoder(self, request: WorkloadRequest, timeline: Timeline) -> ResponseDecoder[Any]:
        """Create a decoder of the response body."""
        return openai.OpenAIDecoder(timeline)


def _base_url(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")


def _is_chat(request: WorkloadRequest) -> bool:
    return not isinstance(request.prompt, str) and isinstance(request.prompt[0], dict)


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ConnectionLost(str(error) or type(error).__name__) from error
