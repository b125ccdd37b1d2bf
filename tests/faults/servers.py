"""Servers of the demo model that are there to be hurt, and a look into their processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from metrics_page import read_metrics

from paged_backend.launch import server_process
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.values.server_memory import regions_with

MODEL = "paged_llm"
_COMMAND = server_process.server_command
ORPHAN_TIMEOUT_S = 30.0  # five seconds on a machine with nothing else to do
LOAD_TIMEOUT_S = 60.0  # time to load an engine on a machine that is busy with other tests
_LOOK_S = 0.03  # listing all processes takes 2 ms of CPU time
_POLL = ("7", "271")  # poll and ppoll on x86-64
_MARK = "PAGED_FAULT_TEST"  # inherited by every process below a server, and kept by its orphans


@contextmanager
def serve_demo(tmp_path: Path, instances: int = 1, **options: object) -> Iterator[RunningServer]:
    """A server of the demo model with these options of ``1/model.json``; it is ready."""
    write_model_repository(tmp_path / "repository", MODEL, {"model": "demo", **options}, instances)
    with serve_repository(tmp_path) as server:
        yield server


def marked(folder: Path) -> dict[str, str]:
    """Environment variables of a server by which its processes are found, whatever is killed."""
    return {_MARK: str(folder)}


@contextmanager
def serve_repository(tmp_path: Path) -> Iterator[RunningServer]:
    """A server of the models in the folder ``repository``; it is ready.

    Whatever happens to it, neither a process nor shared memory of it may be left after the ``with``
    block.
    """
    with start_server(tmp_path / "repository", environment=marked(tmp_path)) as server:
        prefix = region_prefix_of(server)
        assert regions_with(prefix)
        yield server
    wait_for(lambda: not left_of(tmp_path), ORPHAN_TIMEOUT_S, "a process outlives its server")
    what = "shared memory outlives its server"
    wait_for(lambda: not regions_with(prefix), ORPHAN_TIMEOUT_S, what)


def region_prefix_of(server: RunningServer) -> str:
    """What the names of all memory begin with that a server shares with its Python processes."""
    words = psutil.Process(server.pid).cmdline()
    (prefix,) = (word.rpartition("=")[2] for word in words if "shm-region-prefix" in word)
    return prefix


@contextmanager
def serve_demo_with_log(
    tmp_path: Path, *flags: str, **options: object
) -> Iterator[tuple[RunningServer, Path]]:
    """A server of the demo model with more flags, and the file of its log."""
    log_file = tmp_path / "server.log"

    def with_flags(files: Any, models: Path, endpoints: Any, log: Path | None) -> Any:
        argv, variables = _COMMAND(files, models, endpoints, log_file)
        return [*argv, *flags], variables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_process, "server_command", with_flags)
        with serve_demo(tmp_path, **options) as server:
            yield server, log_file


def engine_of(server: RunningServer) -> psutil.Process:
    """The engine's process; fails where there is none, as between its end and its restart."""
    (engine,) = engines_of(server)
    return engine


def engines_of(server: RunningServer) -> list[psutil.Process]:
    """The engine's process, or none; more would be wrong."""
    return _engines(processes_of(server))


def engines_in(tmp_path: Path) -> list[psutil.Process]:
    """The engine's process of the server in that folder, even of one that is still starting."""
    return _engines(left_of(tmp_path))


def stubs_of(server: RunningServer) -> list[psutil.Process]:
    """The front-ends' processes, one for each instance of each model."""
    children = processes_of(server)
    return [p for p in children if any("backend_stub" in word for word in _command(p)[:1])]


def processes_of(server: RunningServer) -> list[psutil.Process]:
    """All living processes below the server's own; one whose parent has died is still there."""
    try:
        mark = _mark_of(psutil.Process(server.pid))
    except psutil.NoSuchProcess:
        return []
    return [p for p in _marked(mark) if p.pid != server.pid]


def left_of(tmp_path: Path) -> list[psutil.Process]:
    """All living processes of a server in that folder, whoever is their parent by now."""
    return _marked(str(tmp_path))


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs or is stopped; one that only waits to be reaped has ended."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for(predicate: Callable[[], object], timeout_s: float, what: str = "") -> float:
    """Seconds until something is so; ``what`` says what is wrong where it never is."""
    started = time.monotonic()
    while not predicate():
        assert time.monotonic() - started < timeout_s, what or "it did not become so in time"
        time.sleep(_LOOK_S)
    return time.monotonic() - started


def metrics(server: RunningServer) -> dict[str, float]:
    """The present value of each of our metrics, without prefix, summed over labels."""
    return read_metrics(server.metrics_url)


def restarts(server: RunningServer) -> float:
    """How many engines have come after the first."""
    return metrics(server)["engine_restarts_total"]


def wait_loaded(server: RunningServer, number: float) -> None:
    """Until so many engines have come after the first, and the last can be used."""

    def loaded() -> bool:
        shown = metrics(server)
        return shown["engine_restarts_total"] >= number and shown["engine_up"] == 1

    wait_for(loaded, LOAD_TIMEOUT_S, "the engine was not started again")


def kill_engine(server: RunningServer) -> float:
    """Kill the engine, or the next as soon as there is one; the moment at which it was done."""
    wait_for(lambda: engines_of(server), LOAD_TIMEOUT_S, "no engine is there to be killed")
    engine = engine_of(server)
    engine.kill()
    moment = time.monotonic()
    wait_for(lambda: not is_alive(engine), LOAD_TIMEOUT_S)
    return moment


def crash_stub(stub: psutil.Process) -> None:
    """Let a front end crash between two responses."""
    stop_between_responses(stub)
    stub.send_signal(signal.SIGSEGV)
    stub.send_signal(signal.SIGCONT)


def stop_between_responses(stub: psutil.Process) -> None:
    """Suspend a front end, but not while it passes a response to its server.

    It holds a lock in their shared memory then, and tritonserver 24.10 aborts if the lock is not
    released.
    """

    def stopped_between_responses() -> bool:
        stub.send_signal(signal.SIGSTOP)
        wait_for(lambda: stub.status() == psutil.STATUS_STOPPED, LOAD_TIMEOUT_S)
        if _waits_for_engine(stub):
            return True
        stub.send_signal(signal.SIGCONT)
        return False

    wait_for(stopped_between_responses, LOAD_TIMEOUT_S, "it does nothing but send")


def _waits_for_engine(stub: psutil.Process) -> bool:
    """Whether its sending thread, which alone makes this system call, waits for the engine."""
    threads = Path(f"/proc/{stub.pid}/task").iterdir()
    return any((thread / "syscall").read_text().split()[0] in _POLL for thread in threads)


def _engines(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if any("engine_process" in word for word in _command(p))]


def command_of(process: psutil.Process) -> str:
    """The words of a process's command line; empty if it has ended."""
    return " ".join(_command(process))


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:  # also for one that only waits to be reaped
        return []


def _marked(mark: str | None) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if mark and _mark_of(p) == mark and is_alive(p)]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(_MARK)
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return None
