"""Who hears how calls go and how the engine does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paged_backend.outputs import EngineStats, SequenceOutput
from paged_backend.request import Request


@dataclass(slots=True)
class AnswerClock:
    """When tokens of one answer arrived, in seconds of the monotonic clock."""

    first: float
    latest: float
    num_tokens: int

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time for each token after the first; None where there is none."""
        if self.num_tokens < 2:
            return None
        return (self.latest - self.first) / (self.num_tokens - 1)


@dataclass(slots=True)
class CallClock:
    """When a call came and when tokens for it arrived."""

    started: float = field(default_factory=time.monotonic)
    answers: dict[int, AnswerClock] = field(default_factory=dict)  # by index

    @property
    def age_s(self) -> float:
        """Seconds since the call came."""
        return time.monotonic() - self.started

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers.values())


class Observer:
    """Called on the sending thread only, between two responses; this one keeps nothing."""

    def report(self, stats: EngineStats, *, anew: bool) -> None:
        """New counts of the engine; ``anew``: others may have told of them since the last time."""

    def report_refused(self, numbers: Mapping[str, int]) -> None:
        """So many calls were refused until now, by reason."""

    def report_lost(self) -> None:
        """The engine has ended."""

    def report_back(self, *, restarted: bool) -> None:
        """There is an engine again; ``restarted``: by this front-end, which is the one to count."""

    def report_tokens(self, clock: CallClock, outputs: Sequence[SequenceOutput]) -> None:
        """Tokens of a call arrived."""

    def report_end(self, clock: CallClock, request: Request) -> None:
        """A call is answered in full."""

    def publish(self, *, idle: bool) -> None:
        """A moment to pass on what has been gathered, all of it while no call is open."""
