"""The process of a rank: ``python -P -m paged_backend.engine.rank_process FOLDER RANK PARENT``.

The kernel ends the process when the engine's process ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path

from paged_backend.values.garbage import without_collections

_PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the kernel was told
        os._exit(1)


def main() -> int:
    """Serve one rank; returns the exit status."""
    folder, rank, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _end_with(parent)
    faulthandler.enable()  # a crash writes its Python stack into the server's log
    # Ctrl-C in a terminal reaches the whole process group; only the server must act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with without_collections():
        from paged_backend.engine.rank_loop import run

    return run(folder, rank)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a regular exit of the interpreter takes seconds
