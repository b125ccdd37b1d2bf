"""A real tritonserver with the demo model, and helpers to send requests to it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrics_page import read_metrics
from servers import marked

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.tools.scrape import scrape

MODEL = "paged_llm"
MAX_NUM_SEQS = 64
TIMEOUT_S = 60.0  # limit of every wait; long, because other tests keep the machine busy
_POLL_S = 0.02  # reading the metrics takes a millisecond of CPU time


@dataclass
class Server:
    """A running server."""

    running: RunningServer

    def post(self, verb: str, fields: dict[str, Any] | bytes) -> tuple[int, str]:
        """Return the status and the body of a ``generate`` or ``generate_stream`` request."""
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        with self.connection() as connection:
            connection.request("POST", f"/v2/models/{MODEL}/{verb}", body)
            response = connection.getresponse()
            return response.status, response.read().decode()

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        address = self.running.http_url.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.running.metrics_url)

    def wait_for(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        deadline = time.monotonic() + TIMEOUT_S
        while (shown := self.metrics())[name] != value:
            assert time.monotonic() < deadline, (name, value, shown)
            time.sleep(_POLL_S)

    def num_ended(self, reason: str) -> float:
        """Return the number of completions with a finish reason: stop, length or abort."""
        ended = scrape(self.running.metrics_url).by_label(
            "request_success_total", "finished_reason"
        )
        return ended[reason]

    @contextmanager
    def aborting(self, number: int) -> Iterator[None]:
        """Check that the ``with`` block aborts this number of completions and frees their KV."""
        before = self.num_ended("abort")
        yield
        deadline = time.monotonic() + TIMEOUT_S
        while (ended := self.num_ended("abort")) < before + number:
            assert time.monotonic() < deadline, f"{ended - before:g} of {number} were cut short"
            time.sleep(_POLL_S)
        self.wait_for("kv_blocks_used", 0)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Keep ``MAX_NUM_SEQS`` sequences running during the ``with`` block.

        They are canceled by their name, because tritonserver 24.10 can crash when a client cancels
        many gRPC calls at once.
        """
        fields = {"text_input": "What does", "max_tokens": 1500, "ignore_eos": True}
        name = {"call_id": "one-of-many"}
        with ThreadPoolExecutor(MAX_NUM_SEQS) as pool:
            calls = [pool.submit(self.post, "generate", fields | name) for _ in range(MAX_NUM_SEQS)]
            try:
                self.wait_for("num_requests_running", MAX_NUM_SEQS)
                yield
            finally:
                self.post("generate", {"task": "cancel"} | name)
        assert {call.result()[0] for call in calls} == {200}

    def is_ready(self) -> bool:
        with self.connection() as connection:
            connection.request("GET", f"/v2/models/{MODEL}/ready")
            return connection.getresponse().status == 200


def read_until(connection: socket.socket, text: bytes) -> None:
    """Read from a connection until the received bytes contain a text."""
    received = b""
    while text not in received:
        piece = connection.recv(4096)
        assert piece, received
        received += piece


@contextmanager
def demo_server(folder: Path) -> Iterator[Server]:
    """Run two instances over one engine, from a model repository in an empty folder."""
    options = {"model": "demo", "max_num_seqs": MAX_NUM_SEQS}
    write_model_repository(folder, MODEL, options, instances=2)
    with start_server(folder, environment=marked(folder)) as running:
        yield Server(running)
