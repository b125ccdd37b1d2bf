"""Programs that end with the process that started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from paged_backend.launch.tied_process import tied_command


def test_a_process_that_uses_grpc_can_start_programs() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    statuses = []
    for _ in range(20):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(30)
            statuses.append(subprocess.run(tied_command(["true"]), process_group=0).returncode)
    server.stop(None)
    assert statuses == [0] * 20


def test_a_program_ends_with_its_parent_and_has_its_number(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import subprocess, sys, time\n"
        "from paged_backend.launch.tied_process import tied_command\n"
        "child = subprocess.Popen(tied_command(['sh', '-c', 'echo $$ > $0; exec sleep 60', "
        "sys.argv[1]]))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(started)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        pidfd = os.pidfd_open(pid)
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        assert int(started.read_text()) == pid
        parent.kill()
    assert signal.SIGKILL == -parent.returncode
    assert select.select([pidfd], [], [], 30)[0], "the program outlives its parent"
    os.close(pidfd)


def test_what_cannot_be_started_is_one_line() -> None:
    command = tied_command(["/no/such/program"])
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 1
    assert run.stderr == "cannot start /no/such/program: No such file or directory\n"
