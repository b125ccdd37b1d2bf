"""Programs that the kernel stops when the thread that started them ends for any reason.

This file is also run as a script, which becomes the program. A `preexec_fn` could do the same, but
then Python forks, and a child of a process that uses gRPC may crash before its `exec`: gRPC's
handlers of forks start threads in it, and their file descriptors are closed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_START = 127  # the exit status of shells


def tied_command(argv: list[str]) -> list[str]:
    """Return a command that runs `argv` as a child of this process and gets SIGINT at its end.

    Start it in the main thread, which lives as long as its process.
    """
    # -I and -S: nothing is imported from the working directory or from other packages.
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def _become(parent: int, argv: list[str]) -> None:
    """Replace this process by a program that ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:  # it has ended before the kernel was told
        sys.exit(_CANNOT_START)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"cannot start {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
