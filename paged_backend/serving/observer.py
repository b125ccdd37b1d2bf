"""Who hears how calls go and how the engine does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paged_backend.outputs import EngineStats, SequenceOutput
from paged_backend.request import Request


@dataclass(slots=True)
class CallClock:
    """When a call came and when tokens for it arrived, in seconds of the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    latest: dict[int, float] = field(default_factory=dict)  # index of an answer -> its last tokens
    num_tokens: int = 0  # of all answers


class Observer:
    """Called on the sending thread only, between two responses; this one keeps nothing."""

    def report(self, stats: EngineStats) -> None:
        """New counts of the engine."""

    def report_dead(self) -> None:
        """The engine has ended."""

    def report_tokens(self, clock: CallClock, outputs: Sequence[SequenceOutput]) -> None:
        """Tokens of a call arrived."""

    def report_end(self, clock: CallClock, request: Request) -> None:
        """A call is answered in full."""

    def publish(self) -> None:
        """A moment to pass on what has been gathered."""
