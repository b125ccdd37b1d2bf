"""Bad constraints and tools at each interface: one error that names the field, for one caller."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from bad_constraints import BAD, GATEWAY, GOOD, MODEL, TRITON, Bad, Request
from demo_server import Server
from effort import ALL, Case, sample
from gateway.gateways import running_gateway
from paged_client import Client, InvalidRequest
from servers import metrics, wait_for
from tool_models import MESSAGES

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server
SAMPLED = {"temperature": 1.0, "seed": 4, "max_tokens": 1500}
LIMIT_S = 30.0  # for a refusal; about 0.5 s of processor time at most on a quiet machine


@dataclass
class Served:
    """A model with tools behind all interfaces, and what four good requests should get."""

    server: RunningServer
    gateway: str
    expected: list[Any] = field(default_factory=list)


@pytest.fixture(scope="module")
def served(tool_server: Server) -> Iterator[Served]:
    server = tool_server.running
    with (
        running_gateway("--triton", server.grpc_url) as gateway,
        Client(server.grpc_url, MODEL, timeout=60) as client,
    ):
        expected = [answer_of(client, fields) for fields in GOOD]
        yield Served(server, gateway.address, expected)
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 30)


def answer_of(client: Client, fields: dict[str, Any]) -> Any:
    """Stream the answer to a good request; return its text and calls."""
    answer = client.generate(MESSAGES, parsed=True, **(SAMPLED | fields)).answers[0]
    assert answer.finish_reason in ("stop", "tool_calls")
    return answer.text, [(call.name, call.arguments) for call in answer.tool_calls]


@contextmanager
def good_streams(served: Served) -> Iterator[None]:
    """Four streams that begin again when they end; each must get the expected answer."""
    over = threading.Event()
    received: list[list[Any]] = [[] for _ in GOOD]

    def ask(index: int, client: Client) -> None:
        while not over.is_set() or not received[index]:
            received[index].append(answer_of(client, GOOD[index]))

    with Client(served.server.grpc_url, MODEL, timeout=60) as client:
        threads = [threading.Thread(target=ask, args=(i, client)) for i in range(len(GOOD))]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()
    for answers, expected in zip(received, served.expected, strict=True):
        assert answers and all(answer == expected for answer in answers)


def refuse(address: str, request: Request) -> None:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        body = json.dumps(request.body).encode()
        connection.request("POST", request.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    assert response.status == 400, (response.status, text)
    assert request.named in text, (request.named, text)


def cases(forms: dict[str, Callable[[Bad], Request | None]]) -> set[Case]:
    """Interfaces and names of bad requests, such that each name is at one of the interfaces."""
    every = [(interface, name) for interface in forms for name in BAD]
    possible: list[Case] = [(i, name) for i, name in every if forms[i](BAD[name]) is not None]
    return set(possible if ALL else sample(possible, 1))


CASES = cases(TRITON) | cases(GATEWAY)


@pytest.mark.parametrize("interface", [*TRITON, *GATEWAY])
def test_bad_requests_by_http_are_refused_while_good_streams_run(
    served: Served, interface: str
) -> None:
    form = (TRITON | GATEWAY)[interface]
    address = served.server.http_url.removeprefix("http://")
    slowest = 0.0
    with good_streams(served):
        for name, bad in BAD.items():
            request = form(bad) if (interface, name) in CASES else None
            if request is not None:
                started = time.monotonic()
                refuse(address if interface in TRITON else served.gateway, request)
                seconds = time.monotonic() - started
                assert seconds < LIMIT_S, name
                slowest = max(slowest, seconds)
    print(f"{interface}: the slowest refusal took {slowest:.2f} s")


@pytest.mark.parametrize("model", [MODEL, "llm", "llm_bls"])
def test_bad_requests_by_grpc_are_refused_while_good_streams_run(
    served: Served, model: str
) -> None:
    with good_streams(served), Client(served.server.grpc_url, model, timeout=60) as client:
        for bad in BAD.values():
            with pytest.raises(InvalidRequest) as caught:
                client.generate(MESSAGES, **bad.fields)
            assert (bad.named or "structured_outputs") in str(caught.value)
