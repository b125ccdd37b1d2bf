"""The processes of all ranks but the first one: how they are started, watched and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

from paged_backend.values.nodes import without_key
from paged_backend.values.server_memory import without_heap_variables

MODULE = "paged_backend.engine.rank_process"


class RankProcesses:
    """Processes that end together, and with this process.

    The kernel kills a rank when the thread that started it ends, even if the rank is stopped. So
    the thread that watches the ranks starts them.

    Args:
        folder: a private folder for sockets.
        ranks: numbers of the ranks.

    Attributes:
        ended: a file descriptor that is readable once a rank has ended.
    """

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self.ended, self._end = os.pipe()
        self._problem: str | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._has_started = Event()
        self._stop, self._stopping = os.pipe()
        self._thread = Thread(target=self._watch, args=(folder, ranks), name="ranks", daemon=True)
        self._thread.start()
        self._has_started.wait()

    @property
    def problem(self) -> str | None:
        """Which rank has ended first, and how; None while all run."""
        return self._problem

    def wait_for_end(self, timeout_s: float) -> str | None:
        """Wait until a rank has ended, for at most a time; returns the problem."""
        select.select([self.ended], [], [], timeout_s)
        return self._problem

    def close(self) -> None:
        """Kill all ranks, and wait until they have ended; only the first call does anything."""
        if self._stopping >= 0:
            os.close(self._stopping)
            self._stopping = -1
            self._thread.join()

    def _watch(self, folder: Path, ranks: Sequence[int]) -> None:
        try:
            for rank in ranks:
                self._processes[rank] = _start(folder, rank)
        except OSError as error:
            self._problem = f"a rank cannot be started: {error}"
        finally:
            self._has_started.set()
        pidfds = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        if self._problem is None:
            ready, _, _ = select.select([self._stop, *pidfds], [], [])
            if self._stop not in ready:
                rank = pidfds[ready[0]]
                self._problem = f"rank {rank} ended: {_status(self._processes[rank].wait())}"
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        os.write(self._end, b"1")
        select.select([self._stop], [], [])
        for descriptor in (self.ended, self._end, self._stop, *pidfds):
            os.close(descriptor)


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """Start a rank with this interpreter; -P keeps it from importing the working directory."""
    command = [sys.executable, "-P", "-m", MODULE, str(folder), str(rank), str(os.getpid())]
    environment = without_key(without_heap_variables(os.environ))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)


def _status(status: int) -> str:
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
