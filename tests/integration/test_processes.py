"""What a server leaves behind, and a client that is interrupted. Deaths: see tests/faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paged_client import Client
from servers import engine_of, is_alive, processes_of, serve_demo

from paged_backend.process.lifetime import ProcessId

pytestmark = pytest.mark.server
SEED_OF_A_LONG_ANSWER = "7"  # at a temperature at which the model says anything


def folder_of(engine):
    """The folder in which the engine keeps its sockets."""
    command = engine.cmdline()
    return Path(command[command.index("--run-dir") + 1])


def test_a_stopped_server_leaves_no_process_no_folder_and_no_shared_memory(tmp_path):
    with serve_demo(tmp_path) as server:
        engine = engine_of(server)
        folder = folder_of(engine)
        assert (folder / "engine.pid").read_text() == str(ProcessId.of(engine.pid))
        assert folder.stat().st_mode & 0o077 == 0
        regions = {
            word
            for process in processes_of(server)
            for word in process.cmdline()
            if word.startswith("triton_python_backend_shm_region")
        }
        assert regions & set(os.listdir("/dev/shm"))
        with Client(server.grpc_url, timeout=60) as client:
            client.generate("What does len do?")
    assert not is_alive(engine)
    assert not folder.exists()
    assert not regions & set(os.listdir("/dev/shm"))


def test_ctrl_c_in_generate_cancels_on_the_server(server):
    command = [sys.executable, "-m", "paged_backend.cli", "generate", "What does"]
    command += ["--url", server.running.grpc_url, "--max-tokens", "1900"]
    command += ["--temperature", "100", "--seed", SEED_OF_A_LONG_ANSWER]
    with server.aborting(1), subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
