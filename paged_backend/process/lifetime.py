"""Processes that depend on each other: watch one without polling it, find one again safely."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from paged_backend.errors import ConfigError

MAX_BASE_LENGTH = 24
_ENROLLED = "front-end-"


def open_process(pid: int) -> int | None:
    """A pidfd that becomes readable when the process ends; ``None`` if it has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def end_with(pid: int, grace_s: float, folder: Path) -> None:
    """Have this process, and all that are enrolled in the folder, end that long after another one.

    A thread sees to it, so that a process ends that is still loading or hangs.
    """
    watched = open_process(pid)

    def end() -> None:
        if watched is not None:
            select.select([watched], [], [])
        time.sleep(grace_s)
        end_enrolled(folder)
        os._exit(1)

    Thread(target=end, name="end-with", daemon=True).start()


def enrol(folder: Path) -> None:
    """Let this process be found by ``end_enrolled``."""
    pid = os.getpid()
    (folder / f"{_ENROLLED}{pid}").write_text(_start_time(pid))


def end_enrolled(folder: Path) -> None:
    """End what is enrolled: a front-end that sends to a server that is gone waits for ever."""
    for file in folder.glob(f"{_ENROLLED}*"):
        pid = int(file.name.removeprefix(_ENROLLED))
        with contextlib.suppress(OSError):
            if _start_time(pid) == file.read_text():
                os.kill(pid, signal.SIGKILL)


def runtime_folder(server_pid: int, model: str, version: str, fingerprint: str) -> Path:
    """The private folder (mode 0700) in which one model of one server keeps its sockets.

    A model that is loaded anew with other options has another ``fingerprint``, so that it does not
    find the engine of the old ones, which may still run.

    A process id may be used again, so the server's start time is part of the name. Folders of
    servers that are gone are removed.

    Raises:
        ConfigError: somebody else owns a folder of that name.
    """
    root = _private(_base() / f"paged-backend-{os.getuid()}")
    _remove_leftovers(root)
    server = _private(root / f"{server_pid}-{_start_time(server_pid)}")
    return _private(server / f"{model[:12]}-{version}-{fingerprint}")


def remove_runtime_folder(folder: Path) -> None:
    """Remove a model's folder, and its server's once that is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def is_stopping(server_pid: int) -> bool:
    """Whether a tritonserver was told to end, which it tells no model before all calls have ended.

    Its main thread then sleeps from second to second until they have; before, it waits for the
    signal. False where the kernel does not say.
    """
    main_thread = Path(f"/proc/{server_pid}/task/{server_pid}")
    try:
        sleeps = "nanosleep" in (main_thread / "wchan").read_text()
        return sleeps and (main_thread / "comm").read_text().strip() == "tritonserver"
    except OSError:
        return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process at the latest."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _base() -> Path:
    """Where runtime files go; a socket's path has at most 107 bytes, so a long one will not do."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base if len(base) <= MAX_BASE_LENGTH else "/tmp")


def _remove_leftovers(root: Path) -> None:
    for folder in root.iterdir():
        pid, _, started = folder.name.partition("-")
        try:
            alive = _start_time(int(pid)) == started
        except (OSError, ValueError):
            alive = False
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(f"{folder} must be a folder that only this user can enter")
    return folder


def _start_time(pid: int) -> str:
    """The process's start in clock ticks since boot: field 22 of ``/proc/PID/stat``."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]
