"""Connections whose requests do not arrive."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from gateways import Gateway, running_gateway

pytestmark = pytest.mark.server
LIMIT_S = 1.0
HEAD = b"GET /nothing HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def impatient():
    before = f"from paged_client.gateway import connections\nconnections.HEADERS_S = {LIMIT_S}"
    with running_gateway("--triton", "127.0.0.1:1", before=before) as gateway:
        yield gateway


@contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        yield connection


def answer(connection: socket.socket) -> bytes:
    """The whole answer to a request for what does not exist."""
    received = b""
    while not received.endswith(b"}}"):
        received += connection.recv(4096)
    return received


def is_closed(connection: socket.socket) -> bool:
    """Whether nothing more comes; waits for it."""
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True


def test_a_connection_that_sends_nothing_is_closed(impatient):
    with connected(impatient) as connection:
        assert is_closed(connection)


@pytest.mark.parametrize("first", [b"", HEAD + b"\r\n"])
def test_headers_that_come_byte_by_byte_are_not_waited_for(impatient, first):
    """With the first request of a connection and with a later one."""
    with connected(impatient) as connection:
        if first:
            connection.sendall(first)
            assert b" 404 " in answer(connection)
        connection.settimeout(0.05)
        for sent in range(10_000):
            try:
                connection.sendall(b"G" if sent == 0 else b"x")
                assert connection.recv(4096) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            raise AssertionError("still open")


def test_a_connection_may_be_idle_between_requests(impatient):
    with connected(impatient) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"\r\n")
            assert b" 404 " in answer(connection)
            time.sleep(2 * LIMIT_S)


def test_a_body_has_a_time_limit_of_its_own(impatient):
    with connected(impatient) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 4\r\n\r\nnu")
        time.sleep(2 * LIMIT_S)
        connection.sendall(b"ll")
        assert b" 400 " in answer(connection)


@pytest.mark.parametrize(("keys", "status"), [(None, b" 400 "), ("secret", b" 401 ")])
def test_a_client_that_breaks_the_protocol_leaves_no_fault_in_the_log(tmp_path, keys, status):
    """Without a key, its body is not looked at."""
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    )
    log = tmp_path / "log"
    with running_gateway("--triton", "127.0.0.1:1", keys=keys, log=log) as gateway:
        for _ in range(5):
            with connected(gateway) as connection:
                connection.sendall(chunked)
                assert status in connection.recv(4096)
    assert log.read_text() == ""
