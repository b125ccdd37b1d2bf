"""A new engine loads the commit that its front ends know, even if the branch has moved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hub_server import Repository, running_hub

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.process.engine_supervisor import (
    EngineDied,
    EngineRestarted,
    EngineSupervisor,
    Event,
)
from paged_backend.process.lifetime import ProcessId
from paged_backend.values.config import EngineConfig


def test_a_new_engine_loads_the_same_commit(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in MODEL_DIR.iterdir()}
    with running_hub() as hub:
        repository = hub.repositories["org/demo"] = Repository.of(files)
        first = repository.refs["main"]
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(short_folder / "huggingface"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        config = EngineConfig(model="org/demo", device="cpu")
        supervisor = EngineSupervisor(config, "llm", "1", os.getpid())
        try:
            ready = supervisor.connect()
            assert (Path(ready.tokenizer).name, ready.commits) == (first, {"revision": first})
            repository.commit(files | {"config.json": b"{}"})  # cannot be loaded
            hub.requests.clear()
            kill_engine(short_folder, supervisor)
            wait_for(EngineRestarted, supervisor)
            assert not any("org/demo" in path for _, path in hub.requests)
        finally:
            kill_engine(short_folder, supervisor)
            supervisor.close()


def kill_engine(folder: Path, supervisor: EngineSupervisor) -> None:
    (pid_file,) = folder.rglob("engine.pid")
    os.kill(ProcessId.parse(pid_file.read_text()).pid, signal.SIGKILL)
    wait_for(EngineDied, supervisor)


def wait_for(event: type[Event], supervisor: EngineSupervisor) -> None:
    deadline = time.monotonic() + 100
    while not any(isinstance(arrived, event) for arrived in supervisor.receive(1)):
        assert time.monotonic() < deadline
