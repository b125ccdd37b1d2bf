"""Processes and folders of others: neither is taken for ours."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from paged_backend.process.engine_client import EngineClient
from paged_backend.process.lifetime import (
    ProcessId,
    end_enrolled,
    open_process,
    remove_runtime_folder,
    runtime_folder,
)
from paged_backend.values.config import EngineConfig

CONFIG = EngineConfig(model="demo")


@pytest.fixture
def stranger() -> Iterator[psutil.Process]:
    """A process that is none of ours, and that shows all about itself already.

    Right after its program was started the kernel does not know its auxiliary vector yet.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", "echo started; read line"], **pipes) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def earlier(pid: int) -> ProcessId:
    """The process that had this number before."""
    now = ProcessId.of(pid)
    return now._replace(started=now.started - 1)


def test_a_process_is_found_by_number_and_start_only(stranger: psutil.Process) -> None:
    assert open_process(earlier(stranger.pid)) is None
    process = ProcessId.parse(str(ProcessId.of(stranger.pid)))
    pidfd = open_process(process)
    assert pidfd is not None
    assert not select.select([pidfd], [], [], 0)[0]
    stranger.kill()
    assert select.select([pidfd], [], [], 30)[0]
    os.close(pidfd)


def test_a_front_end_whose_number_was_given_away_is_not_ended(
    tmp_path: Path, stranger: psutil.Process
) -> None:
    with subprocess.Popen(["sleep", "600"]) as front_end:
        (tmp_path / f"front-end-{earlier(stranger.pid)}").touch()
        (tmp_path / f"front-end-{ProcessId.of(front_end.pid)}").touch()
        end_enrolled(tmp_path)
        assert front_end.wait(30) == -signal.SIGKILL
    assert stranger.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("left", ["a number that was given away", "nothing"])
def test_an_engine_that_is_gone_is_started_again(
    short_folder: Path, stranger: psutil.Process, left: str
) -> None:
    """What its file names by now is another process, or the file was never written."""
    server = ProcessId.of(os.getpid())
    folder = runtime_folder(server, "m", "1", fingerprint_of("m"))
    text = str(earlier(stranger.pid)) if left != "nothing" else ""
    (folder / "engine.pid").write_text(text)
    client = EngineClient(CONFIG, "m", "1", server, None, {}, 0)
    try:
        assert client.has_started
        started = ProcessId.parse((folder / "engine.pid").read_text())
        assert started.pid != stranger.pid
        other = EngineClient(CONFIG, "m", "1", server, None, {}, 0)
        assert not other.has_started
        other.abandon()
    finally:
        client.kill()
        client.abandon()
        remove_runtime_folder(folder)
    assert stranger.is_running()


def test_two_front_ends_may_kill_an_engine_that_hangs(short_folder: Path) -> None:
    """The second one finds it gone, as its parent has waited for it already."""
    server = ProcessId.of(os.getpid())
    first, second = (EngineClient(CONFIG, "m", "1", server, None, {}, 0) for _ in range(2))
    for client in (first, second):
        client.kill()
        client.abandon()
    remove_runtime_folder(runtime_folder(server, "m", "1", fingerprint_of("m")))


def test_an_engine_whose_server_is_gone_ends(tmp_path: Path, stranger: psutil.Process) -> None:
    """The server's number belongs to another process by the time at which the engine looks."""
    command = [
        *(sys.executable, "-P", "-m", "paged_backend.process.engine_process"),
        *("--run-dir", str(tmp_path), "--server", str(earlier(stranger.pid))),
        *("--config", json.dumps(asdict(CONFIG))),
    ]
    with subprocess.Popen(command) as engine:
        try:
            assert engine.wait(60) in (0, 1)  # by the loop, or by the watch over the server
        finally:
            engine.kill()
    assert stranger.is_running()


def test_no_other_folder_of_the_base_stands_in_the_way(short_folder: Path) -> None:
    """Neither files nor folders that anybody can name beforehand; ours are found again."""
    uid = os.getuid()
    (short_folder / f"paged-backend-{uid}").write_text("")
    (short_folder / f"paged-backend-{os.getpid()}").write_text("")
    (short_folder / f"paged-backend-{ProcessId.of(os.getpid())}").write_text("")
    server = ProcessId.of(os.getpid())
    folder = runtime_folder(server, "m", "1", "f")
    assert folder.is_relative_to(short_folder)
    assert folder.stat().st_mode & 0o077 == folder.parent.stat().st_mode & 0o077 == 0
    assert runtime_folder(server, "m", "1", "f") == folder
    remove_runtime_folder(folder)
    assert len(list(short_folder.iterdir())) == 3


def test_folders_of_servers_that_are_gone_are_removed(
    short_folder: Path, stranger: psutil.Process
) -> None:
    gone = runtime_folder(ProcessId.of(stranger.pid), "m", "1", "f")
    alive = runtime_folder(ProcessId.of(os.getpid()), "m", "1", "f")
    assert gone.is_dir() and alive.is_dir()
    stranger.kill()
    wait_until(lambda: stranger.status() == psutil.STATUS_ZOMBIE)
    runtime_folder(ProcessId.of(os.getpid()), "n", "1", "f")
    assert not gone.parent.exists()
    assert alive.is_dir()


UNSHARE = ["unshare", "--user", "--map-root-user"]
CAN_UNSHARE = not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode
REMOVE_LEFTOVERS = """
import os
from paged_backend.process.lifetime import ProcessId, runtime_folder
runtime_folder(ProcessId.of(os.getpid()), "m", "1", "f")
"""


@pytest.mark.skipif(not CAN_UNSHARE, reason="this user cannot create a namespace")
@pytest.mark.parametrize(
    "namespace", [["--kill-child"], ["--pid", "--fork", "--mount-proc"]], ids=["user", "PID"]
)
def test_folders_of_servers_in_other_namespaces_stay(
    short_folder: Path, stranger: psutil.Process, namespace: list[str]
) -> None:
    """A process there cannot read what identifies the server, or does not see it."""
    other = runtime_folder(ProcessId.of(stranger.pid), "m", "1", "f")
    command = [*UNSHARE, *namespace, sys.executable, "-P", "-c", REMOVE_LEFTOVERS]
    subprocess.run(command, check=True, env=os.environ | {"XDG_RUNTIME_DIR": str(short_folder)})
    assert len(list(short_folder.iterdir())) == 2
    assert other.is_dir()


@pytest.mark.parametrize("base", ["/proc/nobody", ""])
def test_a_base_that_cannot_be_used_is_passed_over(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    """As XDG_RUNTIME_DIR is after `su`, or in a container."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    folder = runtime_folder(ProcessId.of(os.getpid()), "m", "1", "f")
    assert folder.is_relative_to(short_folder)


def fingerprint_of(model: str) -> str:
    from paged_backend.process.engine_client import _fingerprint

    return _fingerprint(CONFIG, model, 0)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
