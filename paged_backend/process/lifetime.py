"""Processes that depend on each other: watch one without polling it, find one again safely."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_backend.errors import ConfigError

MAX_BASE_LENGTH = 24


def open_process(pid: int) -> int | None:
    """A pidfd that becomes readable when the process ends; ``None`` if it has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


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
