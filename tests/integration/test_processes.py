"""What happens to the others when one of the processes dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from paged_client import Client, Unavailable

from paged_backend.demo.metrics import read_metrics
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

pytestmark = pytest.mark.server


@pytest.fixture
def running(tmp_path):
    """A server of this test's own, to be hurt."""
    write_model_repository(tmp_path, "paged_llm", {"model": "demo"}, instances=2)
    with start_server(tmp_path) as server:
        yield server


def engine_of(server):
    children = psutil.Process(server.pid).children(recursive=True)
    engines = [p for p in children if any("engine_process" in word for word in p.cmdline())]
    assert len(engines) == 1, "all instances share one engine"
    return engines[0]


def folder_of(engine):
    """The folder in which the engine keeps its sockets."""
    command = engine.cmdline()
    return Path(command[command.index("--run-dir") + 1])


def wait_gone(process, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{process} is still there"
        time.sleep(0.05)


def test_a_dead_engine_ends_its_streams_at_once_and_the_model_says_so(running):
    with Client(running.grpc_url, timeout=60) as client:
        streams = [client.stream("What does", max_tokens=1500, ignore_eos=True) for _ in range(4)]
        for stream in streams:
            next(stream)
        engine_of(running).kill()
        killed = time.monotonic()
        for stream in streams:
            with pytest.raises(Unavailable, match="engine_dead"):
                list(stream)
        assert time.monotonic() - killed < 2.0
        with pytest.raises(Unavailable, match="engine_dead"):
            client.generate("What does")
    assert read_metrics(running.metrics_url)["engine_up"] == 0


def test_every_process_ends_with_a_killed_server(running):
    children = psutil.Process(running.pid).children(recursive=True)
    assert engine_of(running) in children
    assert len(children) == 3  # two stubs besides
    with Client(running.grpc_url, timeout=60) as client:
        streams = [client.stream("What does", max_tokens=1800, ignore_eos=True) for _ in range(4)]
        for stream in streams:
            next(stream)
        os.kill(running.pid, signal.SIGKILL)
        for process in children:
            wait_gone(process)


def test_a_dead_front_end_takes_only_its_own_streams(running):
    engine = engine_of(running)
    stubs = [
        p
        for p in psutil.Process(running.pid).children()
        if "triton_python_backend_stub" in p.name() or "stub" in p.exe()
    ]
    assert len(stubs) == 2
    with Client(running.grpc_url, timeout=60) as client:
        streams = [client.stream("What does", max_tokens=1800, ignore_eos=True) for _ in range(4)]
        for stream in streams:
            next(stream)
        stubs[0].kill()
        wait_for_blocks = time.monotonic() + 10
        while read_metrics(running.metrics_url)["num_requests_running"] > 2:
            assert time.monotonic() < wait_for_blocks
            time.sleep(0.02)
        assert engine.is_running()
        for stream in streams:
            stream.cancel()


def test_a_stopped_server_leaves_no_process_no_folder_and_no_shared_memory(tmp_path):
    write_model_repository(tmp_path, "paged_llm", {"model": "demo"}, instances=1)
    with start_server(tmp_path) as server:
        engine = engine_of(server)
        folder = folder_of(engine)
        assert (folder / "engine.pid").read_text() == str(engine.pid)
        assert folder.stat().st_mode & 0o077 == 0
        regions = {
            word
            for process in psutil.Process(server.pid).children()
            for word in process.cmdline()
            if word.startswith("triton_python_backend_shm_region")
        }
        assert regions & set(os.listdir("/dev/shm"))
        with Client(server.grpc_url, timeout=60) as client:
            client.generate("What does len do?")
    wait_gone(engine)
    assert not folder.exists()
    assert not regions & set(os.listdir("/dev/shm"))


def test_ctrl_c_in_generate_cancels_on_the_server(running):
    command = [sys.executable, "-m", "paged_backend.cli", "generate", "What does"]
    command += ["--url", running.grpc_url, "--max-tokens", "1900", "--temperature", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    deadline = time.monotonic() + 5
    while read_metrics(running.metrics_url)["kv_blocks_used"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
