"""Lets processes notice the end of others, and find each other through a private folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import NamedTuple, Self

from paged_backend.values.errors import ConfigError
from paged_backend.values.server_memory import own_region, remove_regions

MAX_BASE_LENGTH = 16
_ENROLLED = "front-end-"
_STEPS = "steps"  # the folder of a pipeline's steps; no model's folder has this name
_KILL_S = 1.0  # how long processes that were killed may take to end
_SERVER_FOLDER = re.compile(r"paged-backend-([0-9a-f]+)-(\d+)-([0-9a-f]+)")


class ProcessId(NamedTuple):
    """Identifies one process forever; the kernel reuses process numbers."""

    pid: int
    started: int  # in clock ticks since the machine's start

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has this number now. Raises OSError if there is none."""
        stat = Path(f"/proc/{pid}/stat").read_text()
        return cls(pid, int(stat.rpartition(")")[2].split()[19]))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of ``str``. Raises ValueError for any other text."""
        pid, started = text.split("-")
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}"


def open_process(process: ProcessId) -> int | None:
    """Return a pidfd that becomes readable when the process ends; None if it has ended."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Read after the pidfd was opened, so the number cannot have been reused in between.
    with contextlib.suppress(OSError):
        if ProcessId.of(process.pid) == process:
            return pidfd
    os.close(pidfd)
    return None


def end_with(process: ProcessId, grace_s: float, folder: Path) -> None:
    """Exit after another process has exited.

    A thread waits for the other process, so that this process ends even while it loads or hangs.
    After the other process has exited, the thread waits for ``grace_s``, kills the front ends that
    are enrolled in ``folder``, and exits with status 1.
    """
    watched = open_process(process)

    def end() -> None:
        if watched is not None:
            select.select([watched], [], [])
        time.sleep(grace_s)
        end_enrolled(folder)
        os._exit(1)

    Thread(target=end, name="end-with", daemon=True).start()


def enrol(folder: Path) -> Path:
    """Register this process for ``end_enrolled``; returns the file that does it.

    The file has the name of the memory that the process shares with the server.
    """
    file = folder / f"{_ENROLLED}{ProcessId.of(os.getpid())}"
    file.write_text(own_region())
    return file


def end_enrolled(folder: Path) -> None:
    """Kill the front ends that are enrolled in a folder, after their server has ended.

    A front end that was sending a response when the server ended waits forever. It holds Python's
    global interpreter lock, so none of its threads can notice that the server has ended.

    The memory that they shared with the server is removed, because a server that was killed could
    not remove it. If this process is among them, it is killed last.
    """
    files = {
        ProcessId.parse(file.name.removeprefix(_ENROLLED)): file
        for file in (*folder.glob(f"{_ENROLLED}*"), *folder.parent.glob(f"{_STEPS}/{_ENROLLED}*"))
    }
    regions: dict[Path, str] = {}
    for file in files.values():
        with contextlib.suppress(OSError):  # it has just ended properly
            regions[file] = file.read_text()
    itself = ProcessId.of(os.getpid())
    _kill([process for process in files if process != itself])
    left = remove_regions(regions.values(), own=own_region())
    for file, region in regions.items():
        if region not in left:  # otherwise the next start of a server tries again
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder.parent / _STEPS).rmdir()
    if itself in files:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill(processes: list[ProcessId]) -> None:
    """Kill processes, and wait ``_KILL_S`` seconds at most until they have ended."""
    pidfds = [pidfd for pidfd in map(open_process, processes) if pidfd is not None]
    for pidfd in pidfds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    deadline_s = time.monotonic() + _KILL_S
    for pidfd in pidfds:
        select.select([pidfd], [], [], max(0.0, deadline_s - time.monotonic()))
        os.close(pidfd)


class StepsFolder:
    """Enrols a step of a pipeline, which has no engine to watch the server for it.

    It ends with the front ends of the models of the same server.

    Args:
        server_pid: the process id of tritonserver, which runs.
    """

    def __init__(self, server_pid: int) -> None:
        base = _base()
        _remove_leftovers(base)
        folder = _private(_server_folder(base, ProcessId.of(server_pid)))
        self._file = enrol(_private(folder / _STEPS))

    def leave(self) -> None:
        """Undo it, as the server ends this process properly."""
        with contextlib.suppress(OSError):  # others are still enrolled
            self._file.unlink()
            self._file.parent.rmdir()
            self._file.parent.parent.rmdir()


def runtime_folder(server: ProcessId, model: str, version: str, fingerprint: str) -> Path:
    """Return the private folder (mode 0700) for the sockets of one model of one server.

    A model that is loaded again with other options has another ``fingerprint``, so that it does not
    find the engine with the old options, which may still run.

    All front ends of a server find the same folder, and no other user can create a folder of that
    name first. Folders of servers that have ended are removed; folders of other PID namespaces are
    not, because containers may share a folder for temporary files without seeing each other.

    Raises:
        ConfigError: the folder cannot be created, or it belongs to another user.
    """
    base = _base()
    _remove_leftovers(base)
    folder = _private(_server_folder(base, server))
    return _private(folder / f"{model[:12]}-{version}-{fingerprint}")


def _server_folder(base: Path, server: ProcessId) -> Path:
    return base / f"paged-backend-{_pid_namespace()}-{server.pid}-{_secret(server)}"


def remove_runtime_folder(folder: Path) -> None:
    """Remove a model's folder, and its server's folder once that is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def is_stopping(server_pid: int) -> bool:
    """Return whether tritonserver is shutting down.

    The server notifies its models of a shutdown only after all requests have ended. This function
    therefore checks what the server's main thread waits for: a signal while it serves, and a timer
    of one second while it shuts down. It returns False if the kernel does not show this.
    """
    main_thread = Path(f"/proc/{server_pid}/task/{server_pid}")
    try:
        sleeps = "nanosleep" in (main_thread / "wchan").read_text()
        return sleeps and (main_thread / "comm").read_text().strip() == "tritonserver"
    except OSError:
        return False


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock, which ends with this process at the latest."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _base() -> Path:
    """Return the folder for runtime files; its path is short, as a socket's path is limited."""
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if 0 < len(base) <= MAX_BASE_LENGTH and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    return Path("/tmp")


def _pid_namespace() -> str:
    """Return the number of the namespace that gives this process's PIDs their meaning, in hex."""
    return f"{Path('/proc/self/ns/pid').stat().st_ino:x}"


def _secret(process: ProcessId) -> str:
    """Return a name for a process that only its own user can compute.

    The auxiliary vector has addresses that the kernel draws at random for each process and shows
    only to the user of the process.
    """
    auxiliary_vector = b""  # the kernel does not show it: use the start time
    with contextlib.suppress(PermissionError):
        auxiliary_vector = _auxiliary_vector(process.pid)
    return hashlib.blake2b(auxiliary_vector + str(process).encode(), digest_size=6).hexdigest()


def _auxiliary_vector(pid: int) -> bytes:
    return Path(f"/proc/{pid}/auxv").read_bytes()


def _remove_leftovers(base: Path) -> None:
    namespace = _pid_namespace()
    for folder in base.iterdir():
        name = _SERVER_FOLDER.fullmatch(folder.name)
        if name is None or name[1] != namespace or not _is_own(folder):
            continue
        if not _may_be_of(name[3], int(name[2])):
            with contextlib.suppress(OSError):  # another process removes it, too
                for model in list(folder.iterdir()):
                    end_enrolled(model)
            shutil.rmtree(folder, ignore_errors=True)


def _may_be_of(secret: str, pid: int) -> bool:
    """Return whether the process may be the one of this secret; it is if nothing shows otherwise.

    A process in a user namespace cannot read the auxiliary vectors of those outside of it.
    """
    try:
        _auxiliary_vector(pid)
        return _secret(ProcessId.of(pid)) == secret
    except PermissionError:
        return True
    except OSError:
        return False


def _is_own(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _private(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(f"{folder} must be a folder that only this user can enter")
    return folder
