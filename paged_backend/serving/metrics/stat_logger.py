"""The interface for metrics of requests and of the engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paged_backend.values.outputs import EngineStats, SequenceOutput
from paged_backend.values.request import Request


@dataclass(slots=True)
class AnswerClock:
    """Arrival times of the tokens of one completion, in seconds of the monotonic clock."""

    first: float
    latest: float
    num_tokens: int

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of each token after the first; None if there is none."""
        if self.num_tokens < 2:
            return None
        return (self.latest - self.first) / (self.num_tokens - 1)


@dataclass(slots=True)
class RequestClock:
    """Arrival times of a request and of its tokens."""

    started: float = field(default_factory=time.monotonic)
    answers: dict[int, AnswerClock] = field(default_factory=dict)  # by index

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(answer.num_tokens for answer in self.answers.values())


class StatLogger:
    """Is called on the sending thread, between two responses; this one does nothing."""

    def report(self, engine: int, stats: EngineStats, *, anew: bool) -> None:
        """Report new counts of an engine, which are numbered from 0.

        ``anew`` is true if another front end may have reported since this one did.
        """

    def report_refused(self, numbers: Mapping[str, int]) -> None:
        """Report the number of refused requests so far, by reason."""

    def report_lost(self, engine: int) -> None:
        """Report that an engine has ended."""

    def report_back(self, engine: int, *, restarted: bool) -> None:
        """Report that a new engine is ready; ``restarted`` if this front end started it."""

    def report_tokens(self, clock: RequestClock, outputs: Sequence[SequenceOutput]) -> None:
        """Record that tokens of a request have arrived."""

    def report_end(self, clock: RequestClock, request: Request) -> None:
        """Record that all completions of a request have ended.

        This is not called for a request that ends with an error or is canceled.
        """

    def publish(self, *, idle: bool) -> None:
        """Report some recorded values, or all of them if no request is open (``idle``)."""
