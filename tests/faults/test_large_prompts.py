"""Prompts that take long to tokenize wait for each other, and nobody else waits for them."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gateway.gateways import running_gateway
from paged_client import Client, InvalidRequest, Unavailable
from servers import MODEL, metrics, processes_of, serve_demo, wait_for
from tritonclient.grpc import InferenceServerClient, InferInput

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

# About 12 ms of tokenizing, and more tokens than the model takes.
LONG = "The quick brown fox jumps over the lazy dog. " * 900
MANY = 50
RATE = 0.05  # requests a second from one tenant: one at once, and the next after 20 seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("large")
    with serve_demo(folder, max_tenant_request_rate=RATE, log_level="debug") as server:
        yield server
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 10)


class Stream:
    """A gRPC stream with many requests; answers and errors are read as they arrive."""

    def __init__(self, client: InferenceServerClient) -> None:
        self._client = client
        self._arrived: queue.Queue[str] = queue.Queue()
        client.start_stream(lambda result, error: self._arrived.put(str(error or "answered")))

    def ask(self, text: str, tenant: str, task: str = "generate") -> None:
        """Send a request; its answer is "answered" or the text of its error."""
        inputs = []
        for name, value in (("text_input", text), ("task", task)):
            inputs.append(InferInput(name, [1], "BYTES"))
            inputs[-1].set_data_from_numpy(np.array([value.encode()], object))
        self._client.async_stream_infer(
            MODEL, inputs, parameters={"max_tokens": 1, "tenant": tenant}
        )

    def answers(self, number: int) -> list[str]:
        """The next answers in the order in which they arrive."""
        return [self._arrived.get(timeout=60) for _ in range(number)]

    @property
    def num_arrived(self) -> int:
        """The number of answers that have arrived and have not been read."""
        return self._arrived.qsize()

    def cancel(self) -> None:
        """Cancel all requests."""
        self._client.stop_stream(cancel_requests=True)


@contextmanager
def stream(server: RunningServer) -> Iterator[Stream]:
    with InferenceServerClient(server.grpc_url) as client:
        yield Stream(client)


def test_a_small_call_passes_large_ones(server: RunningServer) -> None:
    with stream(server) as calls:
        for number in range(MANY):
            calls.ask(LONG, tenant=f"large-{number}")
        calls.ask("hello", tenant="small")
        answers = calls.answers(MANY + 1)
    assert answers.index("answered") < MANY / 2
    assert sum("prompt: has" in answer for answer in answers) == MANY


def test_a_small_call_passes_large_ones_of_the_task_tokenize(server: RunningServer) -> None:
    with stream(server) as large, stream(server) as small:
        for number in range(MANY):
            large.ask(LONG, tenant=f"tokenizing-{number}", task="tokenize")
        small.ask("hello", tenant="beside")
        assert small.answers(1) == ["answered"]
        small.ask("hello", tenant="beside-too", task="tokenize")
        assert small.answers(1) == ["answered"]
        assert large.num_arrived < MANY
        assert large.answers(MANY) == ["answered"] * MANY


def exhaust(server: RunningServer, tenant: str) -> None:
    """Ask as a tenant until it is over its rate."""
    with Client(server.grpc_url, timeout=60) as client, pytest.raises(Unavailable, match="rate_l"):
        for _ in range(3):
            client.generate("hello", max_tokens=1, tenant=tenant)


@pytest.mark.parametrize("task", ["generate", "tokenize"])
def test_a_tenant_over_its_rate_is_refused_before_its_prompts_are_tokenized(
    server: RunningServer, task: str
) -> None:
    tenant = f"eager-{task}"
    exhaust(server, tenant)
    with stream(server) as calls:
        calls.ask(LONG, tenant, task)
        (answer,) = calls.answers(1)
    assert f"rate_limited: tenant '{tenant}' is over" in answer


def test_tokenizing_counts_against_the_rate(server: RunningServer) -> None:
    with stream(server) as calls:
        for _ in range(3):
            calls.ask("hello", "tokenizer", "tokenize")
        assert calls.answers(1) == ["answered"]
    with stream(server) as calls:
        wait_for(lambda: "rate_limited" in asked(calls, "tokenizer"), 4, "it is never refused")


def asked(calls: Stream, tenant: str) -> str:
    calls.ask("hello", tenant, "tokenize")
    return calls.answers(1)[0]


def test_tokenizing_counts_on_the_tenant_of_the_key(server: RunningServer) -> None:
    keys = "alice first, alice second, bob third, fourth"
    with running_gateway("--triton", server.grpc_url, keys=keys) as gateway:

        def status(key: str, path: str, **body: Any) -> int:
            return gateway.post(path, body, Authorization=f"Bearer {key}").status

        for key, path, body in (
            ("third", "/detokenize", {"tokens": [5]}),
            ("first", "/tokenize", {"prompt": "x"}),
        ):
            assert status(key, path, **body) == 200
            deadline = time.monotonic() + 10  # the engine is told, and says so, after the answer
            while status(key, path, **body) == 200:
                assert time.monotonic() < deadline
        assert status("second", "/tokenize", prompt="x") == 429  # a key of the first key's tenant
        assert status("fourth", "/tokenize", prompt="x") == 200


def test_text_beyond_max_waiting_tokens_is_refused(server: RunningServer) -> None:
    with stream(server) as calls:
        for number in range(4 * MANY):
            calls.ask(LONG, tenant=f"waiting-{number}")
        answers = calls.answers(4 * MANY)
    refused = [answer for answer in answers if "queue_full: " in answer]
    assert refused
    assert "characters wait to be tokenized already (max_waiting_tokens); retry" in refused[0]
    # A refusal may overtake the first texts, which take time.
    assert any("prompt: has" in answer for answer in answers)


def test_prompts_of_callers_that_have_left_are_not_tokenized(server: RunningServer) -> None:
    log = log_of(server)
    before = log.read_text().count("Successfully cancelled the request")
    with stream(server) as calls:
        for number in range(MANY):
            calls.ask(LONG, tenant=f"leaving-{number}")
        calls.answers(1)
        calls.cancel()
        # How many it is depends on when the server hears of it.
        wait_for(
            lambda: log.read_text().count("Successfully cancelled the request") > before,
            30,
            "all of the requests were tokenized",
        )


def test_chats_are_answered_while_processes_of_chat_templates_are_stopped(
    server: RunningServer,
) -> None:
    messages = [{"role": "user", "content": "What does len do?"}]
    with Client(server.grpc_url, timeout=60) as client:
        expected = client.generate(messages, max_tokens=8, temperature=0, tenant="chat-1").text
        wait_for(lambda: len(renderers_of(server)) == 2, 10, "there is no spare process")
        renderers = renderers_of(server)
        for renderer in renderers:
            renderer.suspend()
            wait_for(lambda p=renderer: p.status() == psutil.STATUS_STOPPED, 5)  # type: ignore[misc]
        chat = client.generate(messages, max_tokens=8, temperature=0, tenant="chat-2")
        assert chat.text == expected
        assert not any(renderer.is_running() for renderer in renderers)
        with pytest.raises(InvalidRequest, match="prompt: has"):
            client.generate(LONG, max_tokens=1, tenant="large")


def renderers_of(server: RunningServer) -> list[psutil.Process]:
    """The processes of chat templates, of which one is the spare one."""
    return [p for p in processes_of(server) if "template_process" in str(p.cmdline())]


def log_of(server: RunningServer) -> Path:
    command: list[Any] = psutil.Process(server.pid).cmdline()
    (name,) = (word.partition("=")[2] for word in command if word.startswith("--log-file="))
    return Path(name)
