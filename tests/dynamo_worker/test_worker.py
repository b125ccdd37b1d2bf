"""Workers behind Dynamo's own frontend, where its package is installed, and the command's errors.

Workers find the frontend through files, so nothing else has to run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from worker_requests import PARAMS, PROMPTS

from paged_backend.cli import main

HAS_DYNAMO = find_spec("dynamo") is not None and find_spec("dynamo.common") is not None
needs_dynamo = pytest.mark.skipif(not HAS_DYNAMO, reason="ai-dynamo is not installed")


@contextmanager
def process(*words: str, folder: Path, log: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {
        "DYN_FILE_KV": str(folder / "kv"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
    }
    with (folder / log).open("wb") as file:
        command = [sys.executable, "-m", *words]
        running = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def post(port: int, index: int, answers: list[str]) -> None:
    """Stream the answer to a request of `worker_requests` into a list."""
    params = PARAMS[index]
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": PROMPTS[index],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    answers[index] += choice.get("text") or ""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_for_model(port: int) -> None:
    deadline, url = time.monotonic() + 60, f"http://127.0.0.1:{port}/v1/models"
    while b"demo" not in urllib.request.urlopen(url, timeout=10).read():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()[-3000:]
        time.sleep(0.1)


@needs_dynamo
def test_streams_survive_the_end_of_a_worker(tmp_path: Path, expected_texts: list[str]) -> None:
    port = free_port()
    frontend = ("dynamo.frontend", "--http-port", str(port), "--migration-limit", "3")
    worker = ("paged_backend.cli", "dynamo", "demo", "--device", "cpu")
    with ExitStack() as stack:
        stack.enter_context(process(*frontend, folder=tmp_path, log="frontend.log"))
        workers = [
            stack.enter_context(process(*worker, folder=tmp_path, log=f"{number}.log"))
            for number in range(2)
        ]
        for number in range(2):
            wait_for(tmp_path / f"{number}.log", "Serving demo")
        wait_for_model(port)
        answers = [""] * len(PROMPTS)
        threads = [
            threading.Thread(target=post, args=(port, index, answers))
            for index in range(len(PROMPTS))
        ]
        for thread in threads:
            thread.start()
        while sum(map(bool, answers)) < len(answers) // 2:
            time.sleep(0.001)
        workers[0].send_signal(signal.SIGKILL)
        assert any(thread.is_alive() for thread in threads), "all have ended before"
        for thread in threads:
            thread.join()
        # Dynamo drops invalid UTF-8, and our texts replace it with U+FFFD.
        found = [answer.replace("\ufffd", "") for answer in answers]
        assert found == [text.replace("\ufffd", "") for text in expected_texts]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--chat-template", "{{ x }}"], "chat_template has no effect in a Dynamo worker"),
        (["--tool-call-parser", "hermes"], "use --dyn-tool-call-parser"),
        (["--stream-interval", "2"], "stream_interval has no effect"),
        (["--metrics-prefix", "a_"], "metrics_prefix has no effect"),
        (["--custom-jinja-template", "/none"], "custom_jinja_template names no file: /none"),
        (
            ["--kv-events-config", '{"snapshot_endpoint": "tcp://127.0.0.1:1"}'],
            "kv_events_config.snapshot_endpoint cannot be used",
        ),
    ],
)
def test_options_without_effect_are_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dynamo", "demo", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


@pytest.mark.skipif(HAS_DYNAMO, reason="ai-dynamo is installed")
def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dynamo", "demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'paged-backend[dynamo]'" in line
