"""Sends one call at a time under gevent, over each protocol.

The endpoints of the bench do the same under asyncio, which gRPC cannot do in a process of gevent's.
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

from paged_backend.errors import ConfigError
from paged_backend.validation import shorten
from paged_loadtest.endpoints.endpoint import PROBE_TIMEOUT_S, ServerInfo
from paged_loadtest.endpoints.openai import KEY_VARIABLE
from paged_loadtest.locust_options import LocustOptions
from paged_loadtest.locust_statistics import CUT_OFF
from paged_loadtest.protocols import openai, triton_grpc, triton_http
from paged_loadtest.protocols.decoding import Decoder, describe_refusal
from paged_loadtest.request import Request
from paged_loadtest.timeline import Timeline

_MAX_CONNECTIONS = 10_000  # kept open for the next call; more can be open at once
_JSON = {"Content-Type": "application/json"}


class Unreachable(ConfigError):
    """Nobody answers at an address, or not in the protocol."""


class ConnectionLost(Exception):
    """Nobody is there, or who was there left in the middle."""


class Transport(ABC):
    """One protocol to one server, for any number of greenlets at once."""

    name: ClassVar[str]  # in the statistics
    flag: ClassVar[str]  # where its address comes from

    def __init__(self, options: LocustOptions) -> None:
        self.address = self.find_address(options)
        self.model = options.model

    def send(self, request: Request) -> tuple[Timeline, bool]:
        """Make one call and wait for its end, and whether it failed because the connection did.

        A greenlet that is killed here cancels its call; what came before is kept.
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
        """Where the server is."""

    @abstractmethod
    def check(self) -> ServerInfo:
        """See that the server is there and has the model.

        Raises:
            ConfigError: it is not, or has not; the message says what to do.
        """

    @abstractmethod
    def encode(self, request: Request) -> Any:
        """What is sent."""

    @abstractmethod
    def decoder(self, request: Request, timeline: Timeline) -> Decoder[Any]:
        """What takes in the answer."""

    @abstractmethod
    def stream(self, request: Request, message: Any, decoder: Decoder[Any]) -> None:
        """Send a message and feed the decoder; raises ConnectionLost."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connections."""

    def has_default_address(self) -> bool:
        """Whether the user has given no other address."""
        return self.address == self.find_address(LocustOptions())

    def unreachable(self, reason: str) -> Unreachable:
        """Nobody answers there, or not in this protocol."""
        return Unreachable(
            f"{self.flag}: nobody answers at {self.address} "
            f"({shorten(reason, 160, quote=False)}); start the server, give its address, or name "
            "the user classes to run without this one"
        )

    def unknown_model(self, known: Iterable[str]) -> ConfigError:
        """Somebody answers, but has no such model."""
        names = ", ".join(sorted(known)) or "none"
        return ConfigError(
            f"--model: {self.address} has no model {shorten(self.model)} that is ready; "
            f"ready there: {names}"
        )


class GrpcWire(Transport):
    """Triton's gRPC: a stream of its own for each call, all over one connection."""

    name = "gRPC"
    flag = "--grpc-url"

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        init_gevent()  # not at import: the workers of --processes are forked between
        self._channel = grpc.insecure_channel(self.address, options=channel_options(self.address))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def find_address(self, options: LocustOptions) -> str:
        """``host:port``."""
        return options.grpc_url.rpartition("://")[2]

    def check(self) -> ServerInfo:
        """Ask for the model, and a model of ours what it says about itself."""
        try:
            if not self._stub.ModelReady(ready_request(self.model), timeout=PROBE_TIMEOUT_S).ready:
                index = self._stub.RepositoryIndex(index_request(), timeout=PROBE_TIMEOUT_S)
                raise self.unknown_model(model.name for model in index.models)
        except grpc.RpcError as error:
            raise self.unreachable(str(from_status(error))) from error
        try:
            with Client(self.address, self.model, timeout=PROBE_TIMEOUT_S) as client:
                info = client.info()
        except ClientError:  # a peer's model
            return ServerInfo("triton")
        return ServerInfo("triton", info.vocab_size, info.max_model_len)

    def encode(self, request: Request) -> Any:
        """A ``ModelInferRequest``."""
        return triton_grpc.encode(request, self.model)

    def decoder(self, request: Request, timeline: Timeline) -> Decoder[Any]:
        """Takes in ``ModelStreamInferResponse``."""
        return triton_grpc.ResponseDecoder(timeline)

    def stream(self, request: Request, message: Any, decoder: Decoder[Any]) -> None:
        """Send a message and feed the decoder."""
        call = self._stub.ModelStreamInfer(iter((message,)))
        try:
            for response in call:
                decoder.feed(response, perf_counter())
        except grpc.RpcError as error:
            raise ConnectionLost(str(from_status(error))) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Without this the process would not end."""
        self._channel.close()


class HttpWire(Transport):
    """Posts a body and reads a stream of events."""

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
    def path(self, request: Request) -> str:
        """Where the request is posted to."""

    def stream(self, request: Request, message: Any, decoder: Decoder[Any]) -> None:
        """Post a body and feed the decoder."""
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
        """Let go of the connections."""
        self._pool.close()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a short reply; None for a body that is none.

        Raises:
            ConfigError: nobody answers.
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
    """Triton's HTTP, by ``generate_stream``."""

    name = "HTTP"
    flag = "--http-url"

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        self._path = f"/v2/models/{quote(self.model, safe='')}"

    def find_address(self, options: LocustOptions) -> str:
        """A base URL."""
        return _base_url(options.http_url)

    def check(self) -> ServerInfo:
        """Ask for the model, and a model of ours what it says about itself."""
        status, _ = self.ask("GET", "/v2")
        if status != 200:
            raise self.unreachable(f"HTTP {status} for /v2")
        if self.ask("GET", f"{self._path}/ready")[0] != 200:
            _, index = self.ask("POST", "/v2/repository/index", {"ready": True})
            raise self.unknown_model(model["name"] for model in index)
        status, answer = self.ask("POST", f"{self._path}/generate", {"task": "info"})
        if status != 200:  # a peer's model
            return ServerInfo("triton")
        info = json.loads(answer["text_output"])
        return ServerInfo("triton", info["vocab_size"], info["max_model_len"])

    def path(self, request: Request) -> str:
        """Where every request is posted to."""
        return triton_http.path(self.model)

    def encode(self, request: Request) -> bytes:
        """A body of tensors as JSON."""
        return triton_http.encode(request, self.model)

    def decoder(self, request: Request, timeline: Timeline) -> Decoder[Any]:
        """Takes in bytes of the body of the reply."""
        return triton_http.ResponseDecoder(timeline)


class OpenAIWire(HttpWire):
    """OpenAI's completions, and its chat completions for chats."""

    name = "OpenAI"
    flag = "--openai-url"

    def __init__(self, options: LocustOptions) -> None:
        super().__init__(options)
        if key := os.environ.get(KEY_VARIABLE):
            self._headers = _JSON | {"Authorization": f"Bearer {key}"}

    def find_address(self, options: LocustOptions) -> str:
        """A base URL, with or without the path that OpenAI's clients end it with."""
        return _base_url(options.openai_url.rstrip("/").removesuffix("/v1"))

    def check(self) -> ServerInfo:
        """Look for the model in the list."""
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

    def path(self, request: Request) -> str:
        """Chats have a place of their own."""
        return openai.CHATS if _is_chat(request) else openai.COMPLETIONS

    def encode(self, request: Request) -> bytes:
        """A body as OpenAI's."""
        return openai.encode(request, self.model, chat=_is_chat(request))

    def decoder(self, request: Request, timeline: Timeline) -> Decoder[Any]:
        """Takes in bytes of the body of the reply."""
        return openai.ResponseDecoder(timeline)


def _base_url(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")


def _is_chat(request: Request) -> bool:
    return not isinstance(request.prompt, str) and isinstance(request.prompt[0], dict)


@contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ConnectionLost(str(error) or type(error).__name__) from error
