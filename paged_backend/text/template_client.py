"""The client of the process that renders chat templates; it restarts the process if needed."""

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
from collections.abc import Callable, Mapping
from typing import IO, Any

from paged_backend.errors import InvalidRequest, RequestRefused
from paged_backend.text.template_process import TIME_LIMIT_S
from paged_backend.validation import shorten

ANSWER_LIMIT_S = 10.0  # wall-clock time, because a stopped process uses no processor time
START_LIMIT_S = 60.0  # for a new process to be ready, on a busy machine
TURN_LIMIT_S = 30.0  # for which a caller waits for the callers before it
_KILL_LIMIT_S = 5.0
_PIECE = 2**20  # bytes


class TemplateClient:
    """Renders one template at a time; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renderer: _Renderer | None = None

    def start(self) -> None:
        """Start the process, so that the first request need not wait a second for it."""
        with self._lock:
            self._running()

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Render a template with `transformers`.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long or too much; or
                the process does not answer in time.
            RequestRefused: the requests of other clients took all of the time.
        """
        line = json.dumps(arguments).encode() + b"\n"
        if not self._lock.acquire(timeout=TURN_LIMIT_S):
            raise RequestRefused(
                "queue_full",
                f"other chat templates were rendered for over {TURN_LIMIT_S:g} s; retry after 10 s",
            )
        try:
            reply = self._exchange(line)
        finally:
            self._lock.release()
        answer = json.loads(reply)
        if "problem" in answer:
            raise _error(answer["problem"])
        return str(answer["text"])

    def _exchange(self, line: bytes) -> bytes:
        """Send a line and return the answer; without one, a new process is started.

        Raises:
            InvalidRequest: there is no answer.
        """
        renderer = self._running()
        try:
            return renderer.exchange(line)
        except _NoAnswer as error:
            renderer.end()
            self._running()  # so that the next caller need not wait for a new process
            raise _error(str(error)) from None

    def _running(self) -> _Renderer:
        if self._renderer is None or self._renderer.has_ended():
            self._renderer = _Renderer()
        return self._renderer


class _NoAnswer(Exception):
    """The process has ended or does not answer, as the message says."""


class _Renderer:
    """One rendering process."""

    def __init__(self) -> None:
        # -P: nothing is imported from the working directory, which others may be able to write.
        command = [sys.executable, "-P", "-m", "paged_backend.text.template_process"]
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

    def exchange(self, line: bytes) -> bytes:
        """The answer to a line.

        Raises:
            _NoAnswer: there is none.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        if not self._is_ready:
            problem = f"the process of chat templates did not start in {START_LIMIT_S:g} s"
            self._read_line(stdout, _Limit(START_LIMIT_S, problem))
            self._is_ready = True
        problem = f"the process of chat templates gave no answer in {ANSWER_LIMIT_S:g} s"
        limit = _Limit(ANSWER_LIMIT_S, problem)
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

    def _epitaph(self) -> _NoAnswer:
        try:
            status = self._process.wait(_KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            return _NoAnswer("the chat template closed its process's pipes")
        if status == -signal.SIGPROF:
            return _NoAnswer(f"the chat template took over {TIME_LIMIT_S:g} s")
        return _NoAnswer(f"the chat template ended its process (exit status {status})")


class _Limit:
    """A deadline, and the error message after it."""

    def __init__(self, seconds: float, problem: str) -> None:
        self._end_s = time.monotonic() + seconds
        self._problem = problem

    def wait_for(self, pipe: IO[bytes], event: int) -> None:
        """Wait until a pipe can be used. Raises _NoAnswer after the deadline."""
        poll = select.poll()
        poll.register(pipe, event)
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or not poll.poll(1e3 * left_s):
            raise _NoAnswer(self._problem)


def _error(problem: str) -> InvalidRequest:
    return InvalidRequest("messages", shorten(problem, 240, quote=False))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # A process in an uninterruptible system call is not waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_LIMIT_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
