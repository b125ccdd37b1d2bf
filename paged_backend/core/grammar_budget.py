"""Limits on the time of grammars: of a request, and of the engine's thread in each step."""

from __future__ import annotations

import time

from paged_backend.core.grammar import SLOW_S

# Processor time of the grammars of a request, over all of its completions. The masks of real
# schemas take 0.1 ms on average, and 25 ms where a lexer needs many new states.
REQUEST_S = 1.0
REQUEST_TOKEN_S = 0.002  # in addition, for each token of the output
LARGE_S = 0.25  # after which the completions of a request no longer claim their places in steps

# Processor time of all grammars of a step on the engine's thread, for which the others wait.
STEP_S = 0.010
SHORT_STEP_S = 0.002
STEP_SHARE = 0.25  # share of the time that the step takes without them, between these bounds
# Calls of over SLOW_S, which cannot be foreseen, take at most this share of the time.
SLOW_SHARE = 0.05
SLOW_BURST_S = 0.02


class GrammarAccount:
    """The time that the grammars of one request have taken.

    Args:
        request_id: the request.
        failed: receives this account when the request must end.

    Attributes:
        seconds: processor time so far.
        num_tokens: tokens of the output so far, over all completions.
        problem: why the request must end; empty if it need not.
    """

    __slots__ = ("_failed", "num_tokens", "problem", "request_id", "seconds")

    def __init__(self, request_id: str, failed: list[GrammarAccount]) -> None:
        self.request_id = request_id
        self._failed = failed
        self.seconds = 0.0
        self.num_tokens = 0
        self.problem = ""

    @property
    def limit_s(self) -> float:
        """The processor time after which the request must end."""
        return REQUEST_S + REQUEST_TOKEN_S * self.num_tokens

    @property
    def is_large(self) -> bool:
        """True if the request has taken much more time than real schemas take."""
        return self.seconds > LARGE_S

    def charge(self, seconds: float) -> None:
        """Add processor time; the request must end if it was too much."""
        self.seconds += seconds
        if self.seconds > REQUEST_S:  # the limit is at least that
            problem = self.problem_after(0.0)
            if problem:
                self.fail(problem)

    def problem_after(self, seconds: float) -> str:
        """Return why the request must end after so much more time; empty if it need not."""
        if self.seconds + seconds <= self.limit_s:
            return ""
        return f"takes too much time: over {self.limit_s:.1f} s for {self.num_tokens} tokens"

    def fail(self, problem: str) -> None:
        """End the request; the problem continues a sentence about its grammar."""
        if not self.problem:
            self.problem = f"structured_outputs: the grammar {problem}"
            self._failed.append(self)


class StepTime:
    """How long the engine's thread may still work on grammars."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._limit_s = SHORT_STEP_S
        self._spent_s = 0.0  # since the masks of the step began
        self._slow_s = SLOW_BURST_S  # left for calls of over SLOW_S
        self._refilled_s = self._begun_s
        self._processor_s = 0.0  # processor time of the thread when the masks began or ended

    def begin_step(self) -> None:
        """Begin to measure how long a step takes without its masks."""
        self._begun_s = time.monotonic()

    def begin_masks(self) -> None:
        """Set the limit for the masks of a step."""
        now = time.monotonic()
        self._limit_s = min(STEP_S, max(SHORT_STEP_S, STEP_SHARE * (now - self._begun_s)))
        refill = SLOW_SHARE * (now - self._refilled_s)
        self._slow_s = min(SLOW_BURST_S, self._slow_s + refill)
        self._refilled_s = now
        self._spent_s = 0.0
        self._processor_s = time.thread_time()

    def begin_tokens(self) -> None:
        """Leave what the masks of a step did not use to its forced tokens."""
        self._processor_s = time.thread_time()

    @property
    def is_left(self) -> bool:
        """True if the engine's thread may work on another grammar now."""
        return self._spent_s < self._limit_s and self._slow_s > 0

    def spend_since(self, started_s: float) -> float:
        """Count the time since a moment of `time.perf_counter`; return the processor time.

        To ask for the processor time itself takes a system call, which most work is too short for.
        """
        seconds = time.perf_counter() - started_s
        if seconds > SLOW_S:  # perhaps the thread had to wait for a core
            seconds = min(seconds, time.thread_time() - self._processor_s)
        self._spent_s += seconds
        if seconds > SLOW_S:
            self._slow_s -= seconds
        return seconds
