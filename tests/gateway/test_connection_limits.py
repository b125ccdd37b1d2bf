"""More connections than a gateway takes, and what it writes to its log about them."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from gateways import Gateway, running_gateway
from paged_client.gateway import logs
from paged_client.gateway.connection_table import ConnectionTable
from paged_client.gateway.server import RESERVED_FILES

pytestmark = pytest.mark.server
FILES = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"
MAX_ANSWER_S = 4.0  # less than a connection may take for its head
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"


def connect(gateway: Gateway, stack: ExitStack) -> socket.socket:
    address = ("127.0.0.1", gateway.port)
    return stack.enter_context(socket.create_connection(address, timeout=20))


def has_ended(connection: socket.socket) -> bool:
    """Whether the server has closed a connection; does not wait."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def wait_for(condition) -> None:
    ends_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


@pytest.mark.parametrize("first", [b"", b"GET /health/live HTTP/1.1\r\n", b"\x16\x03"])
def test_idle_connections_keep_out_nobody(tmp_path, first):
    """More than twice as many as the process may have open files."""
    log = tmp_path / "log"
    before = FILES.format(soft=128, hard=128)
    with (
        running_gateway("--triton", "127.0.0.1:1", before=before, log=log) as gateway,
        gateway.connection() as good,
        ExitStack() as stack,
    ):
        for number in range(300):
            connection = connect(gateway, stack)
            connection.sendall(first)
            if number % 30 == 0:
                asked = time.monotonic()
                good.request("GET", "/health/live")
                response = good.getresponse()
                assert response.status == 200 and response.read() == b""
                assert gateway.get("/health/live").status == 200
                assert time.monotonic() - asked < MAX_ANSWER_S
        assert gateway.get("/version").status == 200
    lines = log.read_text().splitlines()
    assert len(lines) <= 2 * logs.MAX_LIKE_LINES
    assert all("too many connections: idle ones were closed" in line for line in lines)


def test_requests_in_progress_are_not_closed_for_new_connections(tmp_path):
    log = tmp_path / "log"
    flags = ("--triton", "127.0.0.1:1", "--max-connections", "20")
    with running_gateway(*flags, log=log) as gateway, ExitStack() as stack:
        busy = [connect(gateway, stack) for _ in range(19)]
        for connection in busy:
            connection.sendall(HALF)
        idle = connect(gateway, stack)
        wait_for(lambda: gateway.get("/health/live").status == 200)  # takes the idle one's place
        wait_for(lambda: has_ended(idle))
        last = connect(gateway, stack)
        last.sendall(HALF)
        wait_for(lambda: gateway.get("/health/live").status == 503)
        for _ in range(20):
            refused = gateway.get("/health/live")
            assert refused.error["code"] == "too_many_connections"
            assert refused.headers["Retry-After"] == "1"
        assert not any(has_ended(connection) for connection in (*busy, last))
    assert len(log.read_text().splitlines()) <= 2 * logs.MAX_LIKE_LINES


def test_an_address_has_a_limit(tmp_path):
    flags = ("--triton", "127.0.0.1:1", "--max-connections-per-address", "20")
    with running_gateway(*flags) as gateway, ExitStack() as stack:
        first, *others = [connect(gateway, stack) for _ in range(20)]
        assert gateway.get("/health/live").status == 200
        wait_for(lambda: has_ended(first))
        assert not any(map(has_ended, others))
        for _ in range(20):
            connect(gateway, stack).sendall(HALF)
        wait_for(lambda: gateway.get("/health/live").status == 429)
        assert "at most 20 per address" in gateway.get("/health/live").error["message"]


def test_the_number_of_open_files_is_raised():
    before = FILES.format(soft=RESERVED_FILES, hard=512)
    with running_gateway("--triton", "127.0.0.1:1", before=before) as gateway:
        with ExitStack() as stack:
            connections = [connect(gateway, stack) for _ in range(300)]
            assert gateway.get("/health/live").status == 200
            assert not any(map(has_ended, connections))
        limits = Path(f"/proc/{gateway.process.pid}/limits").read_text().splitlines()
        (files,) = (line.split() for line in limits if line.startswith("Max open files"))
        assert files[3:5] == ["512", "512"]


def test_invalid_requests_write_few_lines(tmp_path):
    log = tmp_path / "log"
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with running_gateway("--triton", "127.0.0.1:1", log=log) as gateway:
        for request in (b"x\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", upgrade, HALF):
            for _ in range(100):
                with ExitStack() as stack:
                    connect(gateway, stack).sendall(request)
        assert gateway.get("/health/live").status == 200
    assert len(log.read_text().splitlines()) <= 2 * logs.MAX_LIKE_LINES


class Connection:
    """A connection of a table."""

    def __init__(self) -> None:
        self.is_open = True

    def evict(self) -> None:
        self.is_open = False


def fill(table, host, number):
    connections = [Connection() for _ in range(number)]
    for connection in connections:
        assert table.add(connection, host) is None
        table.wait(connection)
    return connections


def num_open(connections):
    return sum(connection.is_open for connection in connections)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["192.0.2.1"], 5),
        (["2001:db8::1", "2001:db8::2", "2001:db8::ffff:1"], 5),
        (["::ffff:192.0.2.1", "192.0.2.1"], 5),
        (["192.0.2.1", "192.0.2.2"], 10),
        (["2001:db8:0:1::1", "2001:db8:0:2::1"], 10),
        (["127.0.0.1", "::1", "127.0.0.2"], 10),
        (["testclient", "fe80::1%eth0"], 10),
    ],
)
def test_one_address_has_half_of_all_connections(hosts, expected):
    table = ConnectionTable(10)
    connections = [*fill(table, hosts[0], 1)]
    for number in range(30):
        connections += fill(table, hosts[number % len(hosts)], 1)
    assert num_open(connections) == expected
    assert num_open(connections[-expected:]) == expected  # the oldest were closed


def test_the_connection_that_waited_longest_is_closed():
    table = ConnectionTable(3)
    first, second, third = fill(table, "127.0.0.1", 3)
    table.begin(first)
    table.wait(first)
    table.begin(third)
    for expected in (second, first):
        (new,) = fill(table, "127.0.0.1", 1)
        table.begin(new)
        assert not expected.is_open
    refused = Connection()
    error = table.add(refused, "127.0.0.1")
    assert error is not None and error.status == 503 and refused.is_open
    other = Connection()
    assert table.add(other, "127.0.0.1") is not None
    assert other.is_open and not refused.is_open  # the first to go
    for connection in (third, other, other, refused):
        table.remove(connection)
    assert num_open([*fill(table, "127.0.0.1", 1), new]) == 2


def test_lines_are_counted_by_logger_and_message():
    limit, written = logs.RateLimit(), []

    def log(name, message, *args):
        record = logging.LogRecord(name, logging.WARNING, "", 0, message, args, None)
        if limit.filter(record):
            written.append(record.getMessage())

    for number in range(100):
        log("a", "request %d", number)
    log("b", "request %d", 100)
    kept = [f"request {number}" for number in range(logs.MAX_LIKE_LINES)]
    left_out = 100 - logs.MAX_LIKE_LINES
    assert written == [*kept, f"request 100 ({left_out} more lines were left out)"]
    for number in range(1000):
        log("a", f"another message each time {number}")
    assert len(written) == logs.MAX_LINES
