"""Thousands of generated bad requests: each gets the right error, and nobody else notices."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from bad_requests import CASES, PATH, Case, Infer, Post, Raw
from demo_server import Server
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from paged_client import Client
from servers import metrics, serve_demo, stubs_of, wait_for
from tritonclient.grpc import service_pb2_grpc

from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server
QUESTION = load_questions()[0]
BATCH = 10  # sent at once
TIMEOUT_S = 60.0  # for any answer; over it is a hang
SILENCE_S = 0.1  # after which raw bytes have had their answer

# tritonserver 24.10 answers 500 where its own reader of JSON fails, before it asks a model.
TRITON_S_OWN_500 = (
    *("failed to parse the request JSON buffer", "attempt to get members for non-object"),
    *("Unable to parse ", "Expected JSON object", "attempt to access JSON"),
)
# Over gRPC an error is a text; these are Triton's, about tensors that the model has not declared.
INTERNAL = ("internal error", "Traceback", "Stub process", "not healthy", "engine_dead")


class Wire:
    """Sends cases to one server and checks each answer."""

    def __init__(self, server: RunningServer) -> None:
        self.seen: Counter[str] = Counter()
        self._http = _address(server.http_url.removeprefix("http://"))
        self._grpc = _address(server.grpc_url)
        self._channel = grpc.insecure_channel(server.grpc_url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        """Leave the server."""
        self._channel.close()

    def send(self, case: Case) -> None:
        """Send one and check what comes of it."""
        match case:
            case Post():
                self._post(case)
            case Infer():
                self._infer(case)
            case Raw():
                self._raw(case)

    def _post(self, case: Post) -> None:
        connection = http.client.HTTPConnection(*self._http, timeout=TIMEOUT_S)
        try:
            connection.request("POST", f"{PATH}/{case.verb}", case.body)
            response = connection.getresponse()
            status, text = response.status, response.read().decode(errors="replace")
        finally:
            connection.close()
        self.seen[f"HTTP {status}"] += 1
        _check_http(status, text)
        if case.named is not None:
            assert status == 400, (status, text, _short(case))
            assert case.named in text, (text, _short(case))

    def _infer(self, case: Infer) -> None:
        answers = list(self._stub.ModelStreamInfer(iter([case.message]), timeout=TIMEOUT_S))
        errors = [answer.error_message for answer in answers if answer.error_message]
        self.seen["gRPC error" if errors else "gRPC answer"] += 1
        assert len(errors) == 1 or (answers and not errors), (answers, _short(case))
        for error in errors:
            assert not any(word in error for word in INTERNAL), (error, _short(case))
        if case.named is not None:
            assert errors and case.named in errors[0], (errors, _short(case))

    def _raw(self, case: Raw) -> None:
        address = self._http if case.port == "http" else self._grpc
        answer = b""
        with socket.create_connection(address, timeout=SILENCE_S) as connection:
            try:
                connection.sendall(case.data)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(2**16):
                    answer += part
            except OSError:  # it has closed the connection, or still waits for more
                pass
        self.seen[f"bytes, {'answered' if answer else 'no answer'}"] += 1
        if case.port == "http" and answer.startswith(b"HTTP/1.1 5"):
            _check_http(int(answer[9:12]), answer.decode(errors="replace"))


def _check_http(status: int, text: str) -> None:
    """An answer, or an error of the caller's; each says what is wrong."""
    assert not any(word in text for word in INTERNAL), text
    if status == 500:
        assert any(own in text for own in TRITON_S_OWN_500), text
    else:
        assert status < 500 or status == 501, (status, text)
    assert status == 200 or "error" in text, (status, text)


def _short(case: Case) -> str:
    return repr(case)[:2000]


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition(":")
    return host, int(port)


@contextmanager
def good_streams(server: RunningServer) -> Iterator[list[str]]:
    """Right answers one after the other for as long as the block lasts; they stay right."""
    answers: list[str] = []
    done = threading.Event()

    def ask() -> None:
        with Client(server.grpc_url, timeout=TIMEOUT_S) as client:
            while not done.is_set():
                with client.stream(QUESTION.question, temperature=0, max_tokens=64) as stream:
                    answers.append("".join(chunk.text for chunk in stream))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield answers
        finally:
            done.set()
        asking.result()
    assert set(answers) == {"\n" + QUESTION.answer}


def send_bad_requests(server: RunningServer, number: int, *, derandomize: bool) -> Counter[str]:
    """Send so many, and see that each gets what it should; what was seen."""
    wire = Wire(server)
    with ThreadPoolExecutor(BATCH) as pool:

        @settings(
            max_examples=number // BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # shrinking would send thousands more
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(CASES, min_size=BATCH, max_size=BATCH))
        def send_batch(cases: list[Case]) -> None:
            list(pool.map(wire.send, cases))

        send_batch()
    wire.close()
    return wire.seen


def hurt(server: RunningServer, number: int, *, derandomize: bool) -> Counter[str]:
    """Send bad requests beside good streams; afterwards the server is as it was before."""
    process = psutil.Process(server.pid)
    stubs = stubs_of(server)
    send_bad_requests(server, 100, derandomize=True)  # what is made once is there now
    before = process.num_fds(), process.num_threads()
    with good_streams(server) as answers:
        seen = send_bad_requests(server, number, derandomize=derandomize)
    assert answers
    assert seen.total() >= number
    wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 10)
    assert stubs_of(server) == stubs, "a front-end died"
    after = process.num_fds(), process.num_threads()
    print(f"{dict(seen)}; files and threads {before} -> {after}; {len(answers)} good streams")
    wait_for(lambda: process.num_fds() <= before[0] + 2, 30, "files stay open")
    wait_for(lambda: process.num_threads() <= before[1] + 2, 30, "threads stay")
    return seen


def test_hundreds_of_bad_requests_do_no_harm(server: Server) -> None:
    hurt(server.running, 200, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_thousand_bad_requests_do_no_harm(tmp_path: Path) -> None:
    with serve_demo(tmp_path, instances=2) as server:
        started = time.monotonic()
        seen = hurt(server, 10_000, derandomize=False)
        assert seen.total() >= 10_000
        assert min(seen[kind] for kind in ("HTTP 400", "gRPC error", "bytes, answered")) > 500
        print(f"{seen.total()} in {time.monotonic() - started:.0f} s")
