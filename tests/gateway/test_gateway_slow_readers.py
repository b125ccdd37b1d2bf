"""Clients that read slowly, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
from gateways import MODEL, Gateway, running_gateway
from paged_client import Chunk, TokenLogprob, Unavailable
from paged_client.gateway.backlog import MAX_STARTING, Backlog
from paged_client.gateway.errors import ApiError

LONG = {
    "model": MODEL,
    "prompt": "What does",
    "max_tokens": 1200,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
# Of so many bytes that they do not fit on the way, also where tokens are joined.
LARGE = LONG | {"logprobs": 10}


# The kernel may otherwise take megabytes, so that all of an answer is on its way and the gateway
# closes the connection because it has nothing left to send.
LITTLE_FITS = """
import socket
from paged_backend.launch import ports

def listen(listener, *backlog):
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    return socket.SocketType.listen(listener, *backlog)

socket.socket.listen = listen
"""
UNREAD_FOR_SHORT = f"{LITTLE_FITS}ports.UNREAD_S = 2\n"


@contextmanager
def unread(gateway: Gateway, body) -> Iterator[socket.socket]:
    """The connection of a stream of which nothing is read, and little fits on the way."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(head.encode() + content)
        yield connection


def events(response: bytes) -> list[dict]:
    """What the events of a chunked response say; it must have its end."""
    assert response.startswith(b"HTTP/1.1 200 ")
    assert response.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    return [json.loads(line[6:]) for line in response.splitlines() if line.startswith(b"data: {")]


def joined(chunks) -> tuple[dict, dict]:
    """Each choice put together, and the usage at the end."""
    choices: dict[int, dict] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "reasons": [], "columns": {}})
            whole["text"] += choice["text"]
            whole["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name, column in (choice["logprobs"] or {}).items():
                whole["columns"].setdefault(name, []).extend(column)
    return choices, chunks[-1]["usage"]


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while data := connection.recv(65536):
        received += data
    return bytes(received)


@pytest.mark.server
@pytest.mark.parametrize(
    "options",
    [
        {"prompt": ["What does", "Who"], "n": 2, "max_tokens": 250, "seed": 1, "logprobs": 1},
        pytest.param({}, marks=pytest.mark.soak),
    ],
)
def test_what_waits_for_a_slow_reader_becomes_one_chunk(server, options):
    body = LONG | options
    with (
        running_gateway("--triton", server.running.grpc_url, before=LITTLE_FITS) as gateway,
        unread(gateway, body) as connection,
    ):
        server.wait_for("num_requests_running", 4 if options else 1)
        # The engine waits for no reader. The gateway may be busy with what it gets for longer.
        server.wait_for("num_requests_running", 0)
        opened = f'open_requests{{server="{server.running.grpc_url}"}}'
        wait_until(lambda: gateway.metrics()[opened] == 0)
        slow = events(read_all(connection))
        response = gateway.post("/v1/completions", body)
    fast = [json.loads(line[6:]) for line in response.body.splitlines() if b"{" in line]
    assert joined(slow)[0] == joined(fast)[0]
    counts = [joined(chunks)[1]["completion_tokens"] for chunks in (slow, fast)]
    assert counts == ([1000, 1000] if options else [1200, 1200])
    assert len(slow) < 0.6 * counts[0]


@pytest.mark.server
def test_a_reader_that_falls_too_far_behind_is_left_alone(server, client):
    expected = client.generate("Who", max_tokens=600, ignore_eos=True, temperature=0).text
    with running_gateway(
        "--triton", server.running.grpc_url, "--max-stream-backlog", "256"
    ) as gateway:
        server.wait_for("kv_blocks_used", 0)  # all tokens so far are counted
        generated = server.metrics()["generation_tokens_total"]
        with unread(gateway, LARGE) as connection, gateway.sdk() as api:
            server.wait_for("num_requests_running", 1)
            stream = api.completions.create(
                model=MODEL,
                prompt="Who",
                max_tokens=600,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == expected
            server.wait_for("kv_blocks_used", 0)
            assert server.metrics()["generation_tokens_total"] < generated + 600 + 1200
            *before, last = events(read_all(connection))
        assert last["error"]["code"] == "stream_backlog"
        assert not any("error" in chunk for chunk in before)


@pytest.mark.server
def test_a_connection_of_which_nothing_is_read_is_closed(server):
    with (
        running_gateway("--triton", server.running.grpc_url, before=UNREAD_FOR_SHORT) as gateway,
        unread(gateway, LARGE) as connection,
    ):
        port = connection.getsockname()[1]
        wait_until(lambda: port in peers(gateway))
        server.wait_for("num_requests_running", 1)
        wait_until(lambda: port not in peers(gateway))
        # What was on the way may still be read, then an error or an end; the answer's end is not.
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                received += data
        assert received and not received.endswith(b"0\r\n\r\n")


def peers(gateway: Gateway) -> set[int]:
    """Ports of all who are connected."""
    connections = psutil.Process(gateway.process.pid).net_connections("tcp")
    return {connection.raddr.port for connection in connections if connection.raddr}


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def a_chunk(text: str, index: int = 0, reason: str | None = None) -> Chunk:
    tokens = tuple(map(ord, text))
    logprobs = tuple((TokenLogprob(token, 0.0, 1, chr(token), b""),) for token in tokens)
    return Chunk(text, tokens, reason, 3, len(tokens), index, 2, logprobs)


def test_chunks_of_each_answer_are_joined_while_they_wait():
    async def first():
        for text in ("ab", "c", "d"):
            yield a_chunk(text)
            yield a_chunk(text.upper(), index=1, reason="stop" if text == "d" else None)

    async def second():
        yield a_chunk("xy")
        raise Unavailable("engine_dead: it ended")

    async def scenario():
        async with Backlog([first(), second()], limit=100) as backlog:
            await asyncio.sleep(0.01)
            arrived = [await anext(backlog) for _ in range(3)]
            with pytest.raises(Unavailable):
                await anext(backlog)
        return arrived

    assert asyncio.run(scenario()) == [
        (0, a_chunk("abcd")),
        (0, a_chunk("ABCD", index=1, reason="stop")),
        (1, a_chunk("xy")),
    ]


def test_beyond_the_limit_all_requests_are_closed_at_once():
    closed = []

    async def endless(name):
        try:
            while True:
                yield a_chunk("abc")
                await asyncio.sleep(0)
        finally:
            closed.append(name)

    async def scenario():
        async with Backlog([endless("a"), endless("b")], limit=30) as backlog:
            while len(closed) < 2:
                await asyncio.sleep(0)
            assert sorted(closed) == ["a", "b"]
            with pytest.raises(ApiError, match="stream_backlog: 3[123] tokens"):
                await anext(backlog)

    asyncio.run(scenario())


def test_requests_start_as_others_begin_to_answer_and_not_after_an_error():
    started = []
    begin = [asyncio.Event() for _ in range(40)]

    async def stream(number):
        started.append(number)
        await begin[number].wait()
        if number == 20:
            raise Unavailable("queue_full: no room")
        yield a_chunk("ab")
        yield a_chunk("c", reason="stop")

    async def until(count):
        while len(started) < count:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)  # time for more to start, if they do
        assert started == [*range(count)]

    async def scenario():
        async with Backlog([stream(number) for number in range(40)], limit=1000) as backlog:
            await until(MAX_STARTING)
            for number in range(5):
                begin[number].set()
            await until(MAX_STARTING + 5)
            begin[20].set()
            begin[5].set()
            arrived = [await anext(backlog) for _ in range(6)]
            with pytest.raises(Unavailable):
                await anext(backlog)
            await until(MAX_STARTING + 5)
        return arrived

    arrived = asyncio.run(scenario())
    assert arrived == [(number, a_chunk("abc", reason="stop")) for number in range(6)]
