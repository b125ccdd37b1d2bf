"""Responses with many logits: who else waits for them, and what becomes of them."""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from paged_client import Client
from servers import MODEL, kill_engine, metrics, serve_demo, wait_for, wait_loaded

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

VOCABULARY = 2048
MANY = 4
LONG = "Which word of these words do you know, and which of them is long? " * 20
OPTIONS = {"max_total_logits": 2**21, "max_open_result_bytes": 2**26}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serve_demo(tmp_path_factory.mktemp("logits"), **OPTIONS) as server:
        yield server


def ask(server: RunningServer, text: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """Ask for the logits of a prompt; returns the status and the body."""
    status, body = ask_raw(server, text, **more)
    return status, json.loads(body)


def ask_raw(server: RunningServer, text: str, **more: Any) -> tuple[int, bytes]:
    """Do the same, but leave the body as it is: reading JSON would block other threads here."""
    address = server.http_url.removeprefix("http://")
    fields = {"text_input": text, "max_tokens": 1, "return_num_input_tokens": True}
    body = json.dumps(fields | {"return_context_logits": True} | more)
    with closing(http.client.HTTPConnection(address, timeout=120)) as connection:
        connection.request("POST", f"/v2/models/{MODEL}/generate", body)
        response = connection.getresponse()
        return response.status, response.read()


def prompts(length: int = 400) -> list[str]:
    """Return texts of a given length that share no prefix."""
    return [f"{uuid.uuid4()} {LONG}"[:length] for _ in range(MANY)]


def check(status: int, values: dict[str, Any]) -> None:
    assert status == 200, values
    assert len(values["context_logits"]) == values["num_input_tokens"] * VOCABULARY
    assert np.isfinite(values["context_logits"]).all()


def test_large_responses_neither_stop_a_stream_nor_keep_memory(
    server: RunningServer,
) -> None:
    ask(server, LONG[:100])
    before = psutil.Process(server.pid).memory_info().rss
    moments: list[float] = []
    over = threading.Event()

    def listen() -> None:
        with Client(server.grpc_url, timeout=120) as client:
            while not over.is_set():
                with client.stream("x", max_tokens=1900, ignore_eos=True) as stream:
                    for _ in stream:
                        moments.append(time.monotonic())
                        if over.is_set():
                            break

    with ThreadPoolExecutor(MANY + 1) as pool:
        listener = pool.submit(listen)
        wait_for(lambda: len(moments) > 10, 60)
        began = time.monotonic()
        asked = [pool.submit(ask_raw, server, prompt) for prompt in prompts(900)]
        answers = [future.result() for future in asked]
        took_s = time.monotonic() - began
        over.set()
        listener.result()
    gaps = [after - since for since, after in pairwise(moments) if began < after < began + took_s]
    for status, body in answers:
        check(status, json.loads(body))
    grown_mib = (psutil.Process(server.pid).memory_info().rss - before) / 2**20
    print(f"\n{took_s:.1f} s; longest gap {max(gaps):.2f} s; grown by {grown_mib:.0f} MiB")
    # Sent by the thread that sends the stream, they would be one gap of a fourth of that time.
    assert max(gaps) < took_s / 8
    assert grown_mib < 150


def test_requests_with_large_responses_go_on_after_an_engine_has_ended(
    server: RunningServer,
) -> None:
    engines = metrics(server)["engine_restarts_total"]
    with ThreadPoolExecutor(MANY) as pool:
        asked = [pool.submit(ask, server, prompt) for prompt in prompts()]
        wait_for(lambda: any(future.done() for future in asked), 60)
        kill_engine(server)
        for future in asked:
            check(*future.result())
    wait_loaded(server, engines + 1)


def test_a_deadline_ends_a_request_whose_response_waits_for_others(server: RunningServer) -> None:
    with ThreadPoolExecutor(MANY + 1) as pool:
        asked = [pool.submit(ask, server, prompt) for prompt in prompts()]
        wait_for(lambda: any(future.done() for future in asked), 60)
        last = pool.submit(ask, server, LONG[:400], timeout_s=0.01)
        status, values = last.result()
        assert (status, values["error"]) == (400, "deadline: timeout_s (0.01) is over")
        for future in asked:
            check(*future.result())
    wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 30)


def test_what_open_requests_will_return_is_limited(tmp_path: Path) -> None:
    each = 64 * (4 * VOCABULARY + 64)  # bytes of one request: the log-probability of each, too
    with serve_demo(tmp_path, max_open_result_bytes=each + 4) as server:
        wanted = {"return_context_logits": False, "return_generation_logits": True}
        refused, answered = 0, 0

        def one(_: int) -> tuple[int, dict[str, Any]]:
            return ask(server, "x", max_tokens=64, ignore_eos=True, **wanted)

        with ThreadPoolExecutor(8) as pool:
            for status, values in pool.map(one, range(8)):
                if status == 200:
                    answered += 1
                    assert len(values["generation_logits"]) == 64 * VOCABULARY
                    continue
                refused += 1
                assert values["error"] == (
                    f"queue_full: open requests will return {each} bytes of logits and "
                    "log-probabilities already (max_open_result_bytes); retry after 1 s"
                )
            assert ask(server, "x", return_context_logits=False)[0] == 200
        assert answered and refused
        wait_for(lambda: metrics(server)["request_refused_total"] == refused, 30)
        assert one(0)[0] == 200  # all room is free again


def test_a_client_that_leaves_makes_room_for_others(server: RunningServer) -> None:
    with ThreadPoolExecutor(MANY) as pool:
        asked = [pool.submit(ask, server, prompt) for prompt in prompts()]
        wait_for(lambda: any(future.done() for future in asked), 60)
        for _ in range(MANY):
            body = {"text_input": LONG[:400], "max_tokens": 1, "stream": True}
            leave(server, body | {"return_context_logits": True})
        for future in asked:
            check(*future.result())
    began = time.monotonic()
    assert ask(server, LONG[:400])[0] == 200
    print(f"\nanswered {time.monotonic() - began:.1f} s after the others left")
    wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 30)


def leave(server: RunningServer, fields: dict[str, Any]) -> None:
    """Send a request and disconnect before its response."""
    address = server.http_url.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("POST", f"/v2/models/{MODEL}/generate_stream", json.dumps(fields))
