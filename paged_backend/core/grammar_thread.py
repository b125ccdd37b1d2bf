"""A thread for grammars that take long, so that the engine's thread need not wait for them."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator

from paged_backend.core.grammar import Grammar
from paged_backend.core.grammar_budget import GrammarAccount
from paged_backend.values.errors import as_exception

_NICENESS = 19  # the forward passes come first
_LAST_PIECE_S = 5.0  # the thread is waited for at the end of the process


class MaskJob:
    """Adds tokens to a grammar and computes its next mask, on another thread.

    Nothing else may use the grammar until the job is done.

    Args:
        grammar: the grammar of a sequence.
        account: account of its request.
        token_ids: tokens that the grammar has not accepted yet.

    Attributes:
        mask: the mask after these tokens, once the job is done without a problem.
        problem: why there is none; see `GrammarAccount.fail`.
        seconds: processor time so far.
        is_done: set last.
    """

    def __init__(self, grammar: Grammar, account: GrammarAccount, token_ids: list[int]) -> None:
        self._grammar = grammar
        self._account = account
        self._pieces = self._work(token_ids)
        self._is_cancelled = False
        self.mask = b""
        self.problem = ""
        self.seconds = 0.0
        self.is_done = False

    def cancel(self) -> None:
        """Do no further work; the piece of it that has begun is finished."""
        self._is_cancelled = True

    @property
    def priority(self) -> float:
        """Sort key: requests that took the least time come first."""
        return self._account.seconds + self.seconds

    def go_on(self) -> None:
        """Do one piece of the work."""
        if self._is_cancelled or self._account.problem:
            self.is_done = True
            return
        started_s = time.thread_time()
        is_over = True
        try:
            with self._grammar.lexer.lock:
                next(self._pieces)
            is_over = False
        except StopIteration:
            pass
        except BaseException as error:  # a panic in a Rust library is a BaseException only
            self.problem = f"failed ({type(as_exception(error)).__name__})"
        self.seconds += time.thread_time() - started_s
        self.problem = self.problem or self._account.problem_after(self.seconds)
        self.is_done = is_over or bool(self.problem)

    def _work(self, token_ids: list[int]) -> Iterator[None]:
        grammar = self._grammar
        if grammar.is_stuck:
            yield from grammar.recover()
        for number, token_id in enumerate(token_ids, 1):
            if not grammar.accept([token_id]):
                self.problem = grammar.problem or "does not allow a token of the output"
                return
            if number < len(token_ids):
                yield
        (self.mask,) = grammar.masks_along([])
        while grammar.is_stuck:  # a grammar recovers a few times in a row at most
            yield from grammar.recover()
            (self.mask,) = grammar.masks_along([])
        self.problem = grammar.problem


class GrammarThread:
    """Works on the jobs of an engine, piece by piece; the thread starts with the first job."""

    def __init__(self) -> None:
        self._queue = _Queue()
        self._thread: threading.Thread | None = None

    def submit(self, job: MaskJob) -> None:
        """Add a job."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._queue,), name="grammar-masks", daemon=True
            )
            self._thread.start()
            # At the end of the process, too: a thread must not be in Rust code by then.
            weakref.finalize(self, _end, self._queue, self._thread)
        self._queue.push(job)

    def begin_wait(self) -> None:
        """Let the next `wait` return if a job is done after this call."""
        self._queue.has_done.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait until a job is done."""
        self._queue.has_done.wait(timeout_s)


class _Queue:
    """The jobs that are not done."""

    def __init__(self) -> None:
        self.has_done = threading.Event()
        self._jobs: list[tuple[float, int, MaskJob]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._is_closed = False

    def push(self, job: MaskJob) -> None:
        with self._changed:
            heapq.heappush(self._jobs, (job.priority, next(self._numbers), job))
            self._changed.notify()

    def pop(self) -> MaskJob | None:
        """Wait for a job; returns None at the end."""
        with self._changed:
            while not (self._jobs or self._is_closed):
                self._changed.wait()
            return None if self._is_closed else heapq.heappop(self._jobs)[-1]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()


def _serve(queue: _Queue) -> None:
    with contextlib.suppress(OSError):
        # Linux sets the priority of this thread alone.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    while (job := queue.pop()) is not None:
        job.go_on()
        if job.is_done:
            queue.has_done.set()
        else:
            queue.push(job)


def _end(queue: _Queue, thread: threading.Thread) -> None:
    queue.close()
    if thread is not threading.current_thread():
        thread.join(_LAST_PIECE_S)
