"""Requests that are small in bytes and large in work, and requests in an unusual form."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest
from gateways import MODEL, Gateway, running_gateway

pytestmark = pytest.mark.server
KEY = b"Authorization: Bearer secret\r\n"
ROUTE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
# Seconds: what /health/live may take beside requests that are much work. One callback of the event
# loop is about a millisecond; the rest is for a machine with other work.
MAX_LATENCY_S = 0.8


@pytest.fixture(scope="module")
def guarded():
    """A gateway without a server: it answers valid requests with 503."""
    with running_gateway("--triton", "127.0.0.1:1", keys="secret") as gateway:
        assert gateway.get("/health/live").status == 200  # it has started
        yield gateway


def received_by(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


def raw(gateway: Gateway, *parts: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except ConnectionError:
            pass  # refused before all was sent
        return received_by(connection)


@contextmanager
def latencies(gateway: Gateway) -> Iterator[list[float]]:
    """Seconds that one request after the other for ``/health/live`` takes."""
    measured: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        with gateway.connection() as connection:
            while not is_over.is_set():
                started = time.monotonic()
                connection.request("GET", "/health/live")
                assert connection.getresponse().read() == b""
                measured.append(time.monotonic() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield measured
    finally:
        is_over.set()
        thread.join()


def send_at_once(gateway: Gateway, number: int, content: bytes) -> list[bytes]:
    """Send the same bytes on several connections, so that they arrive together."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=30))
            for _ in range(number)
        ]
        threads = [
            threading.Thread(target=_send, args=(connection, content)) for connection in connections
        ]
        for thread in threads:
            thread.start()
        answers = [received_by(connection) for connection in connections]
        for thread in threads:
            thread.join()
    return answers


def _send(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        connection.sendall(content)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("key", "status"), [(b"", b"HTTP/1.1 401 "), (KEY, b"HTTP/1.1 400 ")], ids=["no key", "key"]
)
@pytest.mark.parametrize(
    "chunk",
    [b"1\r\nx\r\n", b"1;a\r\nx\r\n", b"0\r\n" + b"a:\r\n" * 1000],
    ids=["chunks", "extensions", "trailers"],
)
def test_bodies_of_tiny_pieces_delay_nobody(guarded, key, status, chunk):
    content = ROUTE + key + CHUNKED + chunk * (800_000 // len(chunk))
    with latencies(guarded) as measured:
        answers = send_at_once(guarded, 10, content)
    assert all(answer.startswith(status) for answer in answers)
    if key:
        assert all(b"too_many_pieces" in answer for answer in answers)
    assert max(measured) < MAX_LATENCY_S


@pytest.mark.parametrize(
    "content",
    [
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 60_000 + b"\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n" + b"a:\n" * 60_000 + b"\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: x\r\nX: y\r\n" + b" z\r\n" * 60_000 + b"\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"1\r\nx\r\n" * 100_000,
        pytest.param(
            b"OPTIONS * HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"1\r\nx\r\n" * 100_000,
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            b"HEAD /health/live HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"1\r\nx\r\n" * 100_000,
            marks=pytest.mark.thorough,
        ),
        b"POST /health/live HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"1\r\nx\r\n" * 100_000,
        ROUTE + b"Expect: 100-continue\r\n" + CHUNKED + b"1\r\nx\r\n" * 100_000,
        ROUTE
        + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        + CHUNKED
        + b"1\r\nx\r\n" * 100_000,
    ],
    ids=["headers", "lines", "folds", "GET", "OPTIONS", "HEAD", "POST", "Expect", "Upgrade"],
)
def test_requests_without_a_key_delay_nobody(guarded, content):
    """Routes that need no key read no body, and headers are counted before they are parsed."""
    with latencies(guarded) as measured:
        answers = send_at_once(guarded, 10, content)
    assert all(answer.startswith(b"HTTP/1.1 ") for answer in answers)
    assert not any(answer.startswith(b"HTTP/1.1 400 \r") for answer in answers)  # has a reason
    assert not any(b" 100 Continue" in answer for answer in answers)
    assert max(measured) < MAX_LATENCY_S


def test_many_requests_in_one_segment_delay_nobody(guarded):
    one = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with latencies(guarded) as measured:
        answers = send_at_once(guarded, 5, one * 200 + last)
    assert all(answer.count(b"HTTP/1.1 200 OK") == 201 for answer in answers)
    assert max(measured) < MAX_LATENCY_S


def test_a_body_in_one_byte_segments_is_refused(guarded):
    head = ROUTE + KEY + b"Content-Length: 100000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        with latencies(guarded) as measured:
            for _ in range(20_000):
                connection.sendall(b" ")
            connection.settimeout(0.2)
            answer = b""
            try:
                while data := connection.recv(4096):
                    answer += data
            except TimeoutError:
                pass  # the kernel has joined the segments
    assert answer == b"" or b"too_many_pieces" in answer
    assert max(measured) < MAX_LATENCY_S


def test_a_body_in_chunks_of_usual_sizes_is_served(guarded):
    """As clients send them that write a text as it is made, or a large one in blocks."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    end = b"0\r\nX-Trailer: y\r\n\r\n"
    end += b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    small = b"".join(b"1\r\n%c\r\n" % letter for letter in body)
    spaces = (b"2000;a=b\r\n" + b" " * 8192 + b"\r\n") * 120
    for chunks in (small, spaces + small):
        content = ROUTE + KEY + CHUNKED + chunks + end
        for step in (len(content), 65_000, 1009 if chunks is small else 30_011):
            parts = (content[start : start + step] for start in range(0, len(content), step))
            answer = raw(guarded, *parts)
            assert answer.startswith(b"HTTP/1.1 503 ") and answer.count(b"HTTP/1.1 200 OK") == 1


def test_a_large_body_that_is_refused_is_not_reset(guarded):
    """The client sees the answer although it sends everything first, as most do."""
    for path, headers, status in (
        ("/v1/completions", {}, 401),
        ("/v1/completions", {"Authorization": "Bearer secret"}, 413),
        ("/health", {}, 405),
    ):
        response = guarded.post(path, b" " * 2**24, **headers)
        assert response.status == status


def test_a_body_that_is_not_read_ends_the_connection(guarded):
    with guarded.connection() as connection:
        for method, body in (("GET", b"{}"), ("HEAD", b""), ("GET", b"x" * 10**6), ("GET", None)):
            connection.request(method, "/health/live", body)
            response = connection.getresponse()
            response.read()
            assert response.status == (405 if method == "HEAD" else 200)
            assert response.getheader("Connection") == ("close" if body else None)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Content-Length: 1\r\n" + CHUNKED, b"400"),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n", b"400"),
        (b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", b"400"),
        (b"Content-Length: 1, 1\r\n\r\n", b"400"),
        (b"Transfer-Encoding: gzip\r\n\r\n", b"400"),
        (b"Transfer-Encoding: identity\r\n\r\n", b"400"),
        (b"Transfer-Encoding : chunked\r\n\r\n", b"400"),
        (b"X: y\r\n z\r\n\r\n", b"400"),
        (b"X: y\n\r\n", b"400"),
        (b"X y\r\n\r\n", b"400"),
        (b"Host: y\r\n\r\n", b"400"),
        (b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\n{", b"100"),
    ],
)
def test_a_request_has_one_meaning(guarded, lines, status):
    smuggled = b"1\r\n{\r\n0\r\n\r\nGET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=20) as connection:
        connection.sendall(ROUTE + KEY + lines + (smuggled if status == b"400" else b""))
        connection.shutdown(socket.SHUT_WR)
        answer = received_by(connection)
    assert answer.split(b" ")[1] == status
    assert answer.count(b"HTTP/1.1 ") == (1 if status == b"400" else 2)
    if status == b"400":
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_a_response_may_be_pending_while_the_next_request_is_invalid(guarded):
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    request = ROUTE + KEY + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = raw(guarded, request + b"not HTTP\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503 ") and b"HTTP/1.1 400 " in answer


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/classify", 404, "no route /classify; the page /docs lists the routes"),
        ("POST", "/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/completions", 404, "did you mean /v1/completions?"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("GET", f"/{'x' * 1000}", 404, "xxx...; the page /docs"),
        ("GET", "/%00%C3%A9", 404, r"/\x00\xe9"),
    ],
)
def test_an_error_names_the_route_that_is_missing(guarded, method, path, status, message):
    response = guarded.request(method, path, None, {"x-api-key": "secret"})
    assert response.status == status and message in response.error["message"]


@pytest.mark.parametrize(
    ("limits", "piece", "pause_s"),
    [
        ("closing.LINGER_S = 0.2", b"", 0),
        ("closing.LINGER_S = 0.2\nclosing.MAX_LINGER_S = 1", b"x", 0.05),
        ("closing.MAX_DISCARDED_BYTES = 10**6", b"x" * 10**5, 0),
    ],
    ids=["nothing", "slowly", "much"],
)
def test_a_client_may_not_send_for_ever_after_a_refusal(limits, piece, pause_s):
    before = f"from paged_client.gateway import closing\n{limits}"
    flags = ("--triton", "127.0.0.1:1")
    with (
        running_gateway(*flags, keys="secret", before=before) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection,
    ):
        connection.sendall(ROUTE + b"Content-Length: 1000000000\r\n\r\n")
        assert received_by(connection).startswith(b"HTTP/1.1 401 ")  # and the end of what comes
        started = time.monotonic()
        while has_open_connections(gateway):
            assert time.monotonic() - started < 15
            time.sleep(pause_s or 0.01)
            with contextlib.suppress(ConnectionError):
                connection.sendall(piece)


def has_open_connections(gateway: Gateway) -> bool:
    """Whether the gateway's process has a connection with a client."""
    found = psutil.Process(gateway.process.pid).net_connections("tcp")
    return any(item.laddr.port == gateway.port and item.status != "LISTEN" for item in found)
