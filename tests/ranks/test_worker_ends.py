"""`paged-backend worker` ends at SIGTERM and Ctrl-C, whatever it does at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paged_backend.launch.ports import bind

WORKER = """
import os, signal, sys, threading, time
from paged_backend.cli import main
from paged_backend.engine import node

connect = node.connect

def about_to_wait(*arguments):
    print("it waits", flush=True)
    {what}
    return connect(*arguments)

node.connect = about_to_wait
sys.exit(main(["worker", "--nnodes", "2", "--node-rank", "1", "--master-port", "{port}"]))
"""
TO_ANOTHER_THREAD = """
    def kill_itself():
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.{name})
        time.sleep(60)

    threading.Thread(target=kill_itself, daemon=True).start()
"""
IN_A_DESTRUCTOR = """
    class Lost:
        def __del__(self):
            os.kill(os.getpid(), signal.{name})

    Lost()
"""


@contextmanager
def waiting(what: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker without a server, which does something right before it waits."""
    with bind("127.0.0.1", 0, "port") as free:
        port = free.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(what=what, port=port))
    environment = {**os.environ, "PAGED_CLUSTER_KEY": "k" * 40}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"it waits\n"
            yield process
        finally:
            process.kill()


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 0), ("SIGINT", 130)])
@pytest.mark.parametrize("what", [TO_ANOTHER_THREAD, IN_A_DESTRUCTOR], ids=["thread", "destructor"])
def test_no_signal_is_lost(what: str, name: str, status: int, tmp_path: Path) -> None:
    """Python's handler alone ends neither: it is called late, or its exception goes nowhere."""
    with waiting(what.format(name=name), tmp_path) as process:
        assert process.wait(60) == status


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 0), pytest.param(signal.SIGINT, 130, marks=pytest.mark.thorough)],
)
def test_a_waiting_worker_ends_at_once(number: int, status: int, tmp_path: Path) -> None:
    """Further signals do not disturb it while it cleans up."""
    with waiting("pass", tmp_path) as process:
        time.sleep(0.3)
        started = time.monotonic()
        for _ in range(20):
            process.send_signal(number)
            time.sleep(0.002)
        assert process.wait(60) == status
        assert time.monotonic() - started < 10, "the limit of time has ended it"
