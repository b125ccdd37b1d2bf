"""Asks a sandbox: processes with limits, which are started again when they have ended."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

from paged_backend.sandbox.process import NoAnswer, ProcessLost, SandboxProcess
from paged_backend.values.errors import RequestRefused

__all__ = ["NoAnswer", "Sandbox"]

ANSWER_LIMIT_S = 10.0  # wall-clock time, because a stopped process uses no processor time
TURN_LIMIT_S = 30.0  # for which a caller waits for the callers before it
ATTEMPTS = 2  # a request is repeated once if its process was ended or stopped from outside


class Sandbox:
    """Answers requests, each in a process that has no other request; any thread may use it.

    Beside the processes in use there is a spare one if the limit of processes allows it, so that
    a request that ends its process does not make the next one wait for a new process.

    Args:
        module: the module that the processes run; see :mod:`paged_backend.sandbox.server`.
        subject: what a request is, such as "chat template", for messages.
        time_limit_s: processor time of one answer.
        arguments: arguments of the module's command line.
        max_processes: requests that can be answered at the same time.
        answer_limit_s: wall-clock time of one answer.
    """

    def __init__(
        self,
        module: str,
        *,
        subject: str,
        time_limit_s: float,
        arguments: Sequence[str] = (),
        max_processes: int = 2,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        # -P: nothing is imported from the working directory, which others may be able to write.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._subject = subject
        self._time_limit_s = time_limit_s
        self._max_processes = max_processes
        self._answer_limit_s = answer_limit_s
        self._turns = threading.BoundedSemaphore(max_processes)
        self._lock = threading.Lock()
        self._idle: list[SandboxProcess] = []  # the oldest first
        self._num_used = 0

    def start(self) -> None:
        """Start a process, so that the first request need not wait for it."""
        with self._lock:
            if not self._idle and not self._num_used:
                self._idle.append(self._new())

    def close(self) -> None:
        """End the processes that no request uses; another request starts new ones."""
        with self._lock:
            while self._idle:
                self._idle.pop().end()

    def ask(
        self, request: Any, *, time_limit_s: float | None = None, leaves_ready: bool = False
    ) -> dict[str, Any]:
        """Return the answer to a request, both JSON values.

        Args:
            request: the question.
            time_limit_s: less processor time than the usual limit.
            leaves_ready: wait for a process that is starting rather than take the last one that
                is ready. Requests that will probably end their process leave it to others.

        Raises:
            NoAnswer: the request used up its time, or ended the process.
            RequestRefused: the requests of other clients took all of the time, or the process was
                ended or stopped from outside, again and again.
        """
        line = json.dumps(request).encode() + b"\n"
        limit_s = self._time_limit_s if time_limit_s is None else time_limit_s
        if not self._turns.acquire(timeout=TURN_LIMIT_S):
            raise RequestRefused(
                "queue_full",
                f"other {self._subject}s took over {TURN_LIMIT_S:g} s; retry after 10 s",
            )
        try:
            reply = self._answer(line, limit_s, leaves_ready=leaves_ready)
        finally:
            self._turns.release()
        answer: dict[str, Any] = json.loads(reply)
        return answer

    def _answer(self, line: bytes, limit_s: float, *, leaves_ready: bool) -> bytes:
        problem = ""
        for attempt in range(ATTEMPTS):
            # A second attempt takes a process that started after the first one was lost: what
            # ended that one may have ended the others, which may take a moment to be seen.
            process = self._take(leaves_ready=leaves_ready or attempt > 0)
            try:
                return process.exchange(line, limit_s, self._answer_limit_s)
            except ProcessLost as error:
                process.end()  # it may be stopped
                problem = str(error)
                if error.is_slow:
                    break
            except BaseException:
                process.end()
                raise
            finally:
                self._put_back(process)
        raise RequestRefused("process_lost", f"{problem}; retry after 1 s")

    def _take(self, *, leaves_ready: bool) -> SandboxProcess:
        """Return a process for a request; there is one for each turn."""
        with self._lock:
            self._replace_lost()
            if not self._idle:
                self._idle.append(self._new())
            # The one that was used last comes first, so that the spare one stays as it is.
            in_order = sorted(self._idle, key=lambda process: not process.is_ready())
            process = in_order[-1 if leaves_ready else 0]
            self._idle.remove(process)
            self._num_used += 1
            if process.is_ready():  # otherwise it comes first, to be ready soon
                self._keep(1)
            return process

    def _put_back(self, process: SandboxProcess) -> None:
        with self._lock:
            self._num_used -= 1
            self._idle.insert(0, process)
            self._replace_lost()
            self._keep(2)

    def _replace_lost(self) -> None:
        """Start other processes in place of those that have ended or were stopped."""
        lost = [process for process in self._idle if process.is_lost()]
        for process in lost:
            process.end()
            self._idle.remove(process)
            self._idle.append(self._new())

    def _keep(self, number: int) -> None:
        """Start processes until that number is idle, or no more may be there."""
        while len(self._idle) < min(number, self._max_processes - self._num_used):
            self._idle.append(self._new())

    def _new(self) -> SandboxProcess:
        return SandboxProcess(self._command, self._subject)
