"""Callers with a bare socket: cheap enough for thousands, and able to misbehave in mid-frame."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, cast

from paged_client.protocol import stream_request
from servers import MODEL

from paged_backend.launch.server_process import RunningServer

WIRES = ("grpc", "http")
PROMPT = "What does"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _WINDOW_UPDATE = 0, 1, 3, 4, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW = 4
_CANCEL = struct.pack(">I", 8)
_LARGEST_WINDOW = 2**31 - 1
_DEFAULT_WINDOW = 2**16 - 1
_FRAME_HEADER = 9
_NO_LINGER = struct.pack("ii", 1, 0)
_GRPC_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


class WireCall(asyncio.Protocol):
    """One streamed request on a connection of its own, and when its responses arrived."""

    def __init__(self, wire: str, asked: bytes) -> None:
        self.arrivals: list[float] = []  # times of packets with something of the answer
        self.received = bytearray()
        self.asked_at = 0.0
        self.connected = False
        self._grpc = wire == "grpc"
        self._asked = asked
        self._unread = b""  # the beginning of a frame
        self._ended = asyncio.Event()

    @classmethod
    async def start(
        cls,
        server: RunningServer,
        wire: str,
        params: Mapping[str, Any],
        *,
        window: int = _LARGEST_WINDOW,
        receive_buffer: int | None = None,
        pieces: int | None = None,
    ) -> Self:
        """Connect and ask; only the first so many ``pieces`` of the request are sent.

        The server sends ``window`` bytes ahead of a reader (gRPC), and as many as fit into the
        socket's ``receive_buffer``.
        """
        asked = _ask_grpc(params, window) if wire == "grpc" else _ask_http(params)
        address = server.grpc_url if wire == "grpc" else server.http_url.removeprefix("http://")
        host, _, port = address.rpartition(":")
        connected = socket.socket()
        if receive_buffer is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connected.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connected, (host, int(port)))
        call = cls(wire, b"".join(asked[:pieces]))
        await loop.create_connection(lambda: call, sock=connected)
        return call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.connected = True
        self.asked_at = time.monotonic()
        self._transport.write(self._asked)

    def data_received(self, data: bytes) -> None:
        answer = self._answer_of(data) if self._grpc else data
        if answer:
            self.arrivals.append(time.monotonic())
            self.received += answer
        if not self._grpc and self.received.endswith(b"\r\n0\r\n\r\n"):
            self._ended.set()

    def connection_lost(self, exception: Exception | None) -> None:
        self.connected = False
        self._ended.set()

    async def wait(self, timeout_s: float) -> None:
        """Until the answer is whole or the connection is gone."""
        await asyncio.wait_for(self._ended.wait(), timeout_s)

    @property
    def ttft_s(self) -> float:
        """Seconds from asking to the first of the answer."""
        return self.arrivals[0] - self.asked_at

    # --- ways to read slowly, and to leave ---------------------------------------------------

    def pause(self) -> None:
        """Read nothing more."""
        self._transport.pause_reading()

    def resume(self, more: int = 0) -> None:
        """Read again, and let a gRPC server send so many bytes more than its window."""
        if self._grpc and more:
            update = struct.pack(">I", more)
            self._transport.write(_frame(_WINDOW_UPDATE, 0, 0, update))
            self._transport.write(_frame(_WINDOW_UPDATE, 0, 1, update))
        self._transport.resume_reading()

    def close(self) -> None:
        """Leave as a program does that ends."""
        self._transport.close()

    def reset(self) -> None:
        """Leave as a machine does that loses power and comes back."""
        raw = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def cancel(self) -> None:
        """Leave as a gRPC client that cancels; over HTTP there is only closing."""
        if self._grpc:
            self._transport.write(_frame(_RST_STREAM, 0, 1, _CANCEL))
        self._transport.close()

    def _answer_of(self, data: bytes) -> bytes:
        """What is in the data frames, and what begins the trailers; settings are acknowledged."""
        self._unread += data
        answer = b""
        while len(self._unread) >= _FRAME_HEADER:
            length = int.from_bytes(self._unread[:3]) + _FRAME_HEADER
            if len(self._unread) < length:
                break
            kind, flags, stream = self._unread[3], self._unread[4], self._unread[8]
            if kind == _DATA:
                answer += self._unread[_FRAME_HEADER:length]
            elif kind == _SETTINGS and not flags & _ACK:
                self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
            if (kind in (_DATA, _HEADERS) and flags & _END_STREAM) or kind == _RST_STREAM:
                assert stream == 1
                self._ended.set()
            self._unread = self._unread[length:]
        return answer


async def at_a_rate(
    rate: float, number: int, act: Callable[[int], Awaitable[None]]
) -> list[BaseException]:
    """Start so many a second, whether or not those before have ended; what went wrong with any."""
    started = time.monotonic()
    tasks = []
    for index in range(number):
        await asyncio.sleep(started + index / rate - time.monotonic())
        tasks.append(asyncio.ensure_future(act(index)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [result for result in results if isinstance(result, BaseException)]


def _ask_http(params: Mapping[str, Any]) -> list[bytes]:
    body = json.dumps({"text_input": PROMPT, "stream": True, **params}).encode()
    head = (
        f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return [head[: len(head) // 2].encode(), head[len(head) // 2 :].encode(), body]


def _ask_grpc(params: Mapping[str, Any], window: int) -> list[bytes]:
    """Whole frames: of 50 connections that end within the headers 24.10 keeps one open for ever."""
    message = stream_request(MODEL, PROMPT, params, asked_for=()).SerializeToString()
    headers = {
        **{":method": "POST", ":scheme": "http", ":path": _GRPC_PATH, ":authority": "localhost"},
        **{"te": "trailers", "content-type": "application/grpc"},
    }
    # Literals that are not indexed: no compression to be kept in step.
    block = b"".join(b"\0" + _short(name) + _short(value) for name, value in headers.items())
    frames = [
        _PREFACE,
        _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, window)),
        _frame(_HEADERS, _END_HEADERS, 1, block),
        _frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message),
    ]
    if window > _DEFAULT_WINDOW:  # the connection's own begins with the default
        more = struct.pack(">I", window - _DEFAULT_WINDOW)
        frames.insert(2, _frame(_WINDOW_UPDATE, 0, 0, more))
    return frames


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
