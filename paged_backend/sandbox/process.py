"""One process of a sandbox: what is written to it, what it answers, and why it ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from paged_backend.values.nodes import without_key

START_LIMIT_S = 60.0  # for a new process to be ready, on a busy machine
_KILL_LIMIT_S = 5.0
_LOOK_S = 0.25  # between two looks at a process that does not answer
_PIECE = 2**20  # bytes
_STOPPED = "Tt"  # states of a process in /proc: stopped by a signal, or by a debugger
# Signals that come from outside: of an operator, a service manager, or a kernel without memory.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


class NoAnswer(Exception):
    """The request used up its time or ended the process, as the message says."""

    def __init__(self, problem: str, *, timed_out: bool = False) -> None:
        super().__init__(problem)
        self.timed_out = timed_out  # the request used up its processor time


class ProcessLost(Exception):
    """The process did not answer for a reason outside of the request, as the message says."""

    def __init__(self, problem: str, *, is_slow: bool = False) -> None:
        super().__init__(problem)
        self.is_slow = is_slow  # it got too little processor time, as another one would


class SandboxProcess:
    """One run of a process; used by one thread at a time.

    Args:
        command: its command line.
        subject: what a request is, such as "chat template", for messages.
    """

    def __init__(self, command: Sequence[str], subject: str) -> None:
        self._subject = subject
        self._name = f"the process of {subject}s"
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=without_key(os.environ),
        )
        self.end: Callable[[], object] = weakref.finalize(self, _end, self._process)
        self._was_ready = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def is_lost(self) -> bool:
        """Return True if the process has ended or is stopped."""
        return self._process.poll() is not None or self._is_stopped()

    def is_ready(self) -> bool:
        """Return True if the process has started and can answer at once."""
        poll = select.poll()
        poll.register(self._pipe(self._process.stdout), select.POLLIN)
        return self._was_ready or bool(poll.poll(0))

    def exchange(self, line: bytes, time_limit_s: float, answer_limit_s: float) -> bytes:
        """Return the answer to a line.

        Args:
            line: line of JSON.
            time_limit_s: processor time of the answer, which the process enforces.
            answer_limit_s: wall-clock time, because other processes may take all processor time.

        Raises:
            NoAnswer: the request took too long, or ended the process.
            ProcessLost: something else ended or stopped the process.
        """
        if not self._was_ready:
            self._read_line(_Deadline(START_LIMIT_S), time_limit_s)
            self._was_ready = True
        deadline = _Deadline(answer_limit_s)
        self._write(b"%g %s" % (time_limit_s, line), deadline, time_limit_s)
        return self._read_line(deadline, time_limit_s)

    def _write(self, line: bytes, deadline: _Deadline, time_limit_s: float) -> None:
        pipe = self._pipe(self._process.stdin)
        os.set_blocking(pipe.fileno(), False)  # a pipe whose reader is stopped becomes full
        left = memoryview(line)
        while left:
            self._wait_for(pipe, select.POLLOUT, deadline)
            try:
                left = left[os.write(pipe.fileno(), left[:_PIECE]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._epitaph(time_limit_s) from None

    def _read_line(self, deadline: _Deadline, time_limit_s: float) -> bytes:
        pipe = self._pipe(self._process.stdout)
        line = bytearray()
        while not line.endswith(b"\n"):
            self._wait_for(pipe, select.POLLIN, deadline)
            piece = os.read(pipe.fileno(), _PIECE)
            if not piece:
                raise self._epitaph(time_limit_s)
            line += piece
        return bytes(line)

    def _wait_for(self, pipe: IO[bytes], event: int, deadline: _Deadline) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        while not poll.poll(1e3 * min(_LOOK_S, deadline.left_s)):
            if self._is_stopped():
                raise ProcessLost(f"{self._name} was stopped")
            if deadline.left_s == 0:
                what = "gave no answer" if self._was_ready else "did not start"
                problem = f"{self._name} {what} in {deadline.limit_s:g} s"
                raise ProcessLost(problem, is_slow=True)

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            return stat.rpartition(") ")[2][:1] in _STOPPED
        return False

    def _epitaph(self, time_limit_s: float) -> NoAnswer | ProcessLost:
        try:
            status = self._process.wait(_KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return NoAnswer(f"the {self._subject} closed its process's pipes")
        if not self._was_ready:
            return ProcessLost(f"{self._name} ended while it started (exit status {status})")
        if status == -signal.SIGPROF:
            problem = f"the {self._subject} took over {time_limit_s:g} s"
            return NoAnswer(problem, timed_out=True)
        if -status in _FROM_OUTSIDE:
            return ProcessLost(f"{self._name} was ended by signal {-status}")
        return NoAnswer(f"the {self._subject} ended its process (exit status {status})")

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


class _Deadline:
    """The end of a time limit."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self._end_s - time.monotonic())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # A process in an uninterruptible system call is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_LIMIT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
