"""Grammars that compile fast and then take long: they are refused, and hardly delay other streams.

The gaps of a stream are measured during a hostile request and during an honest one of the same
size, in the same run, and compared.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from callers import quantile
from demo_server import MODEL, Server
from gateway.gateways import Gateway, running_gateway
from paged_client import Client, InvalidRequest

pytestmark = pytest.mark.server
# The output can be divided in ever more ways, so that the time of a mask grows with its length.
AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "a" | "b" | ""'
HONEST = "start: /[ab]*/"
# One mask after the "x" is more work than the limits allow.
_RULES = " | ".join(" ".join("s" * length) for length in range(2, 20))
TOO_MUCH_WORK = f'start: "x" s\ns: {_RULES} | " " | ""'
SAMPLED = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
TOO_LONG = r"^structured_outputs: the grammar takes too much time: over [\d.]+ s for \d+ tokens$"
MAX_FACTOR, SLACK_S = 1.5, 0.05  # bounds of the gaps; a machine that others use delays both
MIN_GAPS, MAX_GAPS = 200, 300  # an answer has 250


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    with running_gateway("--triton", server.running.grpc_url) as gateway:
        yield gateway


class Listener(threading.Thread):
    """Streams answers until it is stopped or has heard enough; measures the gaps."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._address = server.running.grpc_url
        self._is_over = threading.Event()
        self.gaps: list[float] = []
        self.first_s: list[float] = []
        self.start()

    def run(self) -> None:
        with Client(self._address, MODEL, timeout=120) as client:
            while not self._is_over.is_set() and len(self.gaps) < MAX_GAPS:
                moments = [time.monotonic()]
                fields = {"temperature": 0.0, "max_tokens": 250, "ignore_eos": True}
                with client.stream("What does os.getcwd do?", **fields) as stream:
                    moments += [time.monotonic() for _ in stream]
                asked, first, *_ = moments
                self.first_s.append(first - asked)
                self.gaps += [after - before for before, after in pairwise(moments[1:])]

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def listen_beside(
    server: Server, grammar: str, max_tokens: int
) -> tuple[Listener, Exception | None]:
    """Hear a stream while a constrained request runs; returns the request's error, too."""
    error: Exception | None = None
    with Client(server.running.grpc_url, MODEL, timeout=120) as client:
        listener = Listener(server)
        try:
            client.generate(
                "x",
                n=16,
                max_tokens=max_tokens,
                structured_outputs={"grammar": grammar},
                **SAMPLED,
            )
        except InvalidRequest as refusal:
            error = refusal
        finally:
            listener.stop()
    return listener, error


def test_a_stream_hardly_notices_a_grammar_that_takes_long(server: Server) -> None:
    """Other tests may delay one of the streams, but not each time the one beside the grammar."""
    listen_beside(server, HONEST, 16)  # what is made once is there now
    assert any(is_hardly_noticed(server) for _ in range(3))
    server.wait_for("kv_blocks_used", 0)


def is_hardly_noticed(server: Server) -> bool:
    """Compare streams beside a grammar that takes long and beside one that does not."""
    honest, error = listen_beside(server, HONEST, 100)
    assert error is None
    hostile, error = listen_beside(server, AMBIGUOUS, 200)
    with pytest.raises(InvalidRequest, match=TOO_LONG):
        raise error or AssertionError("the hostile request ended well")
    for listener in (honest, hostile):
        print(
            f"{len(listener.gaps)} gaps, p50 {1e3 * quantile(listener.gaps, 0.5):.1f} ms, p99 "
            f"{1e3 * quantile(listener.gaps, 0.99):.1f} ms, first {max(listener.first_s):.2f} s"
        )
    assert len(hostile.gaps) >= MIN_GAPS
    p99, p99_beside = (quantile(listener.gaps, 0.99) for listener in (honest, hostile))
    is_prompt = max(hostile.first_s) < max(honest.first_s) + 0.5
    return p99_beside < MAX_FACTOR * p99 + SLACK_S and is_prompt


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50},
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_each_interface_names_the_reason_that_a_grammar_is_refused(
    gateway: Gateway, name: str
) -> None:
    path, fields = REQUESTS[name]
    reason = "structured_outputs: the grammar needs too much work for one token"
    constraint = {"structured_outputs": {"grammar": TOO_MUCH_WORK}}
    body = {"model": MODEL, "temperature": 1.0, **constraint, **fields}
    whole = gateway.post(path, body)
    assert whole.status == 400 and reason in whole.body.decode()
    streamed = gateway.post(path, body | {"stream": True}).body.decode()
    events = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    assert reason in json.dumps([json.loads(event) for event in events])
