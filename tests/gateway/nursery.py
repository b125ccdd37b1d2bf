"""Gateways that are forks of one process, which has imported what all of them need.

A gateway takes a second of processor time for its imports, and tests start dozens of them. As a
program, ``python nursery.py DESCRIPTOR MODULE ...`` imports the modules and forks at each request
that arrives at a socket; a fork runs the code of its request as ``python -c`` would.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, TextIO

MODULES = ("paged_backend.cli", "paged_client.gateway", "paged_backend.launch.ports")
_REQUEST_BYTES = 2**20
_CLOSE_S = 10.0


class Fork:
    """A process that runs some code; has what tests use of `subprocess.Popen`.

    Args:
        code: what it runs.
        arguments: its command line, without the name of the program.
        environment: all of its environment variables.
        errors: descriptor of the file for its standard error.

    Attributes:
        pid: the process id.
        stdout: what it writes to its standard output.
    """

    def __init__(
        self, code: str, arguments: list[str], environment: Mapping[str, str], errors: int
    ) -> None:
        request = {"code": code, "arguments": arguments, "environment": dict(environment)}
        out, out_end = os.pipe()
        self._report, report_end = os.pipe()
        try:
            content = json.dumps(request).encode()
            socket.send_fds(_nursery(), [content], [report_end, out_end, errors])
        finally:
            os.close(out_end)
            os.close(report_end)
        self.stdout: TextIO = os.fdopen(out)
        self.pid = int(self._line())
        self._pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal; does nothing after the end."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float) -> int:
        """Return the exit status, negative for a signal. Raises TimeoutError."""
        if self._status is None:
            if not select.select([self._report], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} has not ended in {timeout_s:g} s")
            self._status = int(self._line())
            os.close(self._report)
            os.close(self._pidfd)
        return self._status

    def _line(self) -> bytes:
        """A line of the report, which comes in one piece: the process id, or the exit status."""
        line = os.read(self._report, 64)
        assert line.endswith(b"\n"), "the nursery has ended"
        return line


@functools.cache
def _nursery() -> socket.socket:
    """The socket of a process that forks, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(descriptor), *MODULES],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(_CLOSE_S)

    atexit.register(end)
    return ours


def _fork_for_each_request(door: socket.socket) -> dict[str, Any] | None:
    """Return in each fork, with its request, and in the end with None in the process itself."""
    while True:
        content, descriptors, *_ = socket.recv_fds(door, _REQUEST_BYTES, 3)
        if not content:
            return None
        if os.fork() == 0:
            door.close()
            return _watch_a_fork(json.loads(content), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch_a_fork(request: dict[str, Any], report: int, out: int, errors: int) -> dict[str, Any]:
    """Fork once more, and return in the new process only; the other one reports its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(report)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        os.close(out)
        os.close(errors)
        return request
    os.close(out)
    os.close(errors)
    os.write(report, f"{pid}\n".encode())
    end = select.poll()
    end.register(os.pidfd_open(pid), select.POLLIN)
    end.register(report, 0)  # readable when that process ends
    if any(descriptor == report for descriptor, _ in end.poll()):
        os.kill(pid, signal.SIGKILL)  # nobody is there who would stop it
    else:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(report, f"{status}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that watch are not waited for
    wanted = _fork_for_each_request(socket.socket(fileno=int(sys.argv[1])))
    if wanted is not None:
        os.environ.clear()
        os.environ.update(wanted["environment"])
        sys.argv[1:] = wanted["arguments"]
        exec(wanted["code"], {"__name__": "__main__"})
