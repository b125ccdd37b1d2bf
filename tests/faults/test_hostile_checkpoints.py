"""Checkpoints that are made to harm, loaded by a server that serves another model meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from demo_server import Server
from effort import ALL
from paged_client import Client
from servers import MODEL, processes_of, serve_demo_with_log

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.launch.repository import write_model_repository

pytestmark = pytest.mark.server

PAGED_BACKEND = Path(sys.executable).parent / "paged-backend"
EXPLICIT = ("--model-control-mode=explicit", f"--load-model={MODEL}")
MAX_LOAD_S = 40.0  # with the start of its processes; 3 s on a quiet machine
MAX_ANSWER_S = 5.0  # answer time of the other model beside them; 0.2 s on a quiet machine
# Bytes of a process, of which 0.4 GiB are its libraries; one that takes more is ended.
MAX_BYTES = 2**30


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def growing_text(folder: Path) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}
    edit(folder / "tokenizer.json", normalizer=step)


def many_layers(number: int) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", num_hidden_layers=number)


def deep_json(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"a":' * 10**5 + "1" + "}" * 10**5)


def pipe(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")


def device(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


class Harm(NamedTuple):
    """What is done to a checkpoint, and what is said about it."""

    do: Callable[[Path], None]
    problem: str


LAYERS = "num_hidden_layers must be an integer up to 1024, got {}"
HARMS = {
    "growing-text": Harm(growing_text, "its normalizer makes up to 1000000 characters of one"),
    "many-layers": Harm(many_layers(10**5), LAYERS.format(10**5)),
    "deep-json": Harm(deep_json, "generation_config.json must be nested at most 32 levels deep"),
    "pipe": Harm(pipe, "tokenizer_config.json must be a regular file, but is a pipe"),
    "device": Harm(device, "config.json must be a regular file, but is a device"),
}
# `tests/checkpoint/test_hostile_files.py` has more kinds, without a server.
FEW = ("growing-text", "pipe")
KINDS = tuple(HARMS) if ALL else FEW
MORE_LAYERS = Harm(many_layers(10**7), LAYERS.format(10**7))


class Outcome(NamedTuple):
    """Outcomes of loading each kind of checkpoint, and what happened to others meanwhile."""

    loads: dict[str, tuple[int, str]]
    """The status, and the reason if it is an error."""
    too_large: list[str]
    """The command lines of processes that took too much memory."""
    slowest_s: float
    """The longest time for an answer of another model."""
    command: subprocess.CompletedProcess[str]
    """A `paged-backend serve` of one more of them."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hostile")
    for kind in (*KINDS, "served"):
        shutil.copytree(MODEL_DIR, folder / kind)
        HARMS.get(kind, MORE_LAYERS).do(folder / kind)
    too_large, slowest_s = [], 0.0
    with (
        serve_demo_with_log(folder, *EXPLICIT) as (running, _),
        # A load keeps one of the threads of HTTP, and requests that come to it wait.
        Client(running.grpc_url, timeout=MAX_LOAD_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        server = Server(running)
        for kind in KINDS:
            options = {"model": str(folder / kind)}
            write_model_repository(folder / "repository", kind, options, instances=1)
        loads = {kind: pool.submit(load, server, kind) for kind in KINDS}  # one by one
        command = pool.submit(serve, folder / "served")
        while not command.done():  # the last one
            asked = time.monotonic()
            assert client.generate("x", max_tokens=2, ignore_eos=True).num_output_tokens == 2
            slowest_s = max(slowest_s, time.monotonic() - asked)
            too_large += end_large_processes(server)
            time.sleep(0.2)
        ended = {kind: future.result() for kind, future in loads.items()}
        return Outcome(ended, too_large, slowest_s, command.result())


def load(server: Server, name: str) -> tuple[int, str]:
    """Load a model; returns the status, and the first part of an error."""
    with server.connection() as connection:
        connection.timeout = MAX_LOAD_S
        connection.request("POST", f"/v2/repository/models/{name}/load", "{}")
        try:
            response = connection.getresponse()
        except TimeoutError:
            return 0, f"no answer in {MAX_LOAD_S:g} s"
        body = response.read().decode()
    if response.status == 200:
        return 200, ""
    reason, _, _ = json.loads(body)["error"].partition("\n\nAt:")  # where it was raised
    return response.status, reason


def serve(checkpoint: Path) -> subprocess.CompletedProcess[str]:
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    command = ["timeout", str(MAX_LOAD_S), str(PAGED_BACKEND), "serve", str(checkpoint), *ports]
    return subprocess.run(command, capture_output=True, text=True)


def end_large_processes(server: Server) -> list[str]:
    ended = []
    for process in processes_of(server.running):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.memory_info().rss > MAX_BYTES:
                ended.append(" ".join(process.cmdline()))
                process.kill()
    return ended


@pytest.mark.parametrize(
    "kind",
    [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.thorough) for kind in HARMS],
)
def test_a_server_refuses_to_load_a_hostile_checkpoint_and_says_why(
    kind: str, outcome: Outcome
) -> None:
    status, reason = outcome.loads[kind]
    assert status == 400, reason
    assert HARMS[kind].problem in reason and "\n" not in reason


def test_loads_neither_fill_the_memory_nor_stop_another_model(outcome: Outcome) -> None:
    print(f"the slowest answer took {outcome.slowest_s:.2f} s")
    assert outcome.too_large == []
    assert outcome.slowest_s < MAX_ANSWER_S


def test_serve_refuses_a_hostile_checkpoint_in_one_line(outcome: Outcome) -> None:
    command = outcome.command
    assert (command.returncode, command.stdout) == (2, "")
    problem = re.escape(MORE_LAYERS.problem)
    assert re.fullmatch(f"paged-backend: error: .*{problem}\n", command.stderr), command.stderr
