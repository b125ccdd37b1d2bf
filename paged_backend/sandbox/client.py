"""Asks a sandbox: a process with limits, which is started again when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any

from paged_backend.errors import RequestRefused

ANSWER_LIMIT_S = 10.0  # wall-clock time, because a stopped process uses no processor time
START_LIMIT_S = 60.0  # for a new process to be ready, on a busy machine
TURN_LIMIT_S = 30.0  # for which a caller waits for the callers before it
_KILL_LIMIT_S = 5.0
_PIECE = 2**20  # bytes


class NoAnswer(Exception):
    """The process ended or did not answer, as the message says."""

    def __init__(self, problem: str, *, timed_out: bool = False) -> None:
        super().__init__(problem)
        self.timed_out = timed_out  # the request used up its processor time


class Sandbox:
    """Answers one request at a time; any thread may use it.

    Args:
        module: the module that the process runs; see :mod:`paged_backend.sandbox.server`.
        subject: what a request is, such as "chat template", for messages.
        time_limit_s: processor time of one answer, for messages.
        arguments: of its command line.
        answer_limit_s: wall-clock time of one answer; default: ``ANSWER_LIMIT_S``.
    """

    def __init__(
        self,
        module: str,
        *,
        subject: str,
        time_limit_s: float,
        arguments: Sequence[str] = (),
        answer_limit_s: float | None = None,
    ) -> None:
        # -P: nothing is imported from the working directory, which others may be able to write.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._subject = subject
        self._time_limit_s = time_limit_s
        self._answer_limit_s = answer_limit_s
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self) -> None:
        """Start the process, so that the first request need not wait for it."""
        with self._lock:
            self._running()

    def ask(self, request: Any) -> dict[str, Any]:
        """Return the answer to a request, both JSON values.

        Raises:
            NoAnswer: the process ended, or did not answer in time.
            RequestRefused: the requests of other clients took all of the time.
        """
        line = json.dumps(request).encode() + b"\n"
        if not self._lock.acquire(timeout=TURN_LIMIT_S):
            raise RequestRefused(
                "queue_full",
                f"other {self._subject}s took over {TURN_LIMIT_S:g} s; retry after 10 s",
            )
        try:
            reply = self._exchange(line)
        finally:
            self._lock.release()
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def _exchange(self, line: bytes) -> bytes:
        process = self._running()
        try:
            return process.exchange(line, self._answer_limit_s or ANSWER_LIMIT_S)
        except NoAnswer:
            process.end()
            self._running()  # so that the next caller need not wait for a new process
            raise

    def _running(self) -> _Process:
        if self._process is None or self._process.has_ended():
            self._process = _Process(self._command, self._subject, self._time_limit_s)
        return self._process


class _Process:
    """One run of the process."""

    def __init__(self, command: list[str], subject: str, time_limit_s: float) -> None:
        self._subject = subject
        self._time_limit_s = time_limit_s
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.end: Callable[[], object] = weakref.finalize(self, _end, self._process)
        self._is_ready = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Return True if the process has ended; if so, its pipes are closed."""
        if self._process.poll() is None:
            return False
        self.end()
        return True

    def exchange(self, line: bytes, answer_limit_s: float) -> bytes:
        """Return the answer to a line.

        Args:
            line: the request.
            answer_limit_s: wall-clock time of the answer.

        Raises:
            NoAnswer: there is none.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        name = f"the process of {self._subject}s"
        if not self._is_ready:
            problem = f"{name} did not start in {START_LIMIT_S:g} s"
            self._read_line(stdout, _Limit(START_LIMIT_S, problem))
            self._is_ready = True
        limit = _Limit(answer_limit_s, f"{name} gave no answer in {answer_limit_s:g} s")
        self._write(stdin, line, limit)
        return self._read_line(stdout, limit)

    def _write(self, pipe: IO[bytes], line: bytes, limit: _Limit) -> None:
        os.set_blocking(pipe.fileno(), False)  # a pipe whose reader is stopped becomes full
        left = memoryview(line)
        while left:
            limit.wait_for(pipe, select.POLLOUT)
            try:
                left = left[os.write(pipe.fileno(), left[:_PIECE]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._epitaph() from None

    def _read_line(self, pipe: IO[bytes], limit: _Limit) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            limit.wait_for(pipe, select.POLLIN)
            piece = os.read(pipe.fileno(), _PIECE)
            if not piece:
                raise self._epitaph()
            line += piece
        return bytes(line)

    def _epitaph(self) -> NoAnswer:
        try:
            status = self._process.wait(_KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return NoAnswer(f"the {self._subject} closed its process's pipes")
        if status == -signal.SIGPROF:
            problem = f"the {self._subject} took over {self._time_limit_s:g} s"
            return NoAnswer(problem, timed_out=True)
        return NoAnswer(f"the {self._subject} ended its process (exit status {status})")


class _Limit:
    """A deadline, and the error message after it."""

    def __init__(self, seconds: float, problem: str) -> None:
        self._end_s = time.monotonic() + seconds
        self._problem = problem

    def wait_for(self, pipe: IO[bytes], event: int) -> None:
        """Wait until a pipe can be used. Raises NoAnswer after the deadline."""
        poll = select.poll()
        poll.register(pipe, event)
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or not poll.poll(1e3 * left_s):
            raise NoAnswer(self._problem)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # A process in an uninterruptible system call is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_LIMIT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
