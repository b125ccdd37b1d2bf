"""Measures another engine on the batches of `bench decode`, and compares first tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.bench.peer_process import PeerError, PeerProcess, PeerSettings

FIRST_TOKEN_LENGTHS = (128, 512, 2048, 8192)
REPEATS = 5  # first tokens of each length, after one that does not count

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A peer's figures for one batch."""

    context: int  # tokens of each prompt
    batch_size: int
    tokens_per_s: float
    step_ms: float | None  # median; None where only the rate is known
    ratio: float  # the engine's tokens per second divided by the peer's

    def line(self, name: str) -> str:
        """The figures in the columns of the engine's table, and the ratio."""
        step = "" if self.step_ms is None else f"{self.step_ms:.3f}"
        return (
            f"{self.context:7} {self.batch_size:6} {self.tokens_per_s:11.1f} {step:>9}  {name}; "
            f"the engine is {self.ratio:.3f} times as fast"
        )


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Median times in milliseconds from a request alone to its first token."""

    num_tokens: int  # length of the prompt
    engine_ms: float
    peer_ms: float | None = None
    ratio: float | None = None  # the peer's time divided by the engine's

    def compared(self, peer_ms: float | None) -> FirstToken:
        """Return the same with the peer's time; None: it has none."""
        ratio = None if peer_ms is None else peer_ms / self.engine_ms
        return replace(self, peer_ms=peer_ms, ratio=ratio)

    def line(self) -> str:
        """The times and their ratio."""
        line = f"first token of {self.num_tokens} tokens: {self.engine_ms:.2f} ms"
        if self.peer_ms is None:
            return line
        return f"{line}, the peer's {self.peer_ms:.2f} ms ({self.ratio:.3f} times the engine's)"


@dataclass(frozen=True, slots=True)
class PeerReport:
    """Everything measured on a peer."""

    name: str
    in_turn: bool  # True: after each batch of the engine; False: after all of them
    about: dict[str, str] = field(default_factory=dict)  # versions and number formats
    rows: list[PeerRow] = field(default_factory=list)
    problem: str | None = None  # the reason for missing figures; None if all are there


class DecodePeer:
    """A peer with a limited time for all its work; a context manager.

    After a failure, `problem` says what failed, and all figures are None.

    Args:
        seconds: the limit. It counts while the peer loads or is measured, not in between.
    """

    def __init__(self, options: PeerOptions, settings: PeerSettings, seconds: float) -> None:
        self.about: dict[str, str] = {}
        self.problem: str | None = None
        self._seconds_left = seconds
        self._process = self._limited(
            lambda seconds: PeerProcess(options, settings, load_seconds=seconds)
        )
        if self._process is not None:
            self.about = self._process.about

    def __enter__(self) -> DecodePeer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.close()

    def row(
        self, prompts: list[list[int]], warm_up: int, num_steps: int, engine_tokens_per_s: float
    ) -> PeerRow | None:
        """Time steps in which all prompts, of one length, decode."""
        steps = self._asked(
            lambda process, limit: process.decode(prompts, warm_up, num_steps, limit)
        )
        if steps is None:
            return None
        rate = len(prompts) * len(steps) / sum(steps)
        return PeerRow(
            context=len(prompts[0]),
            batch_size=len(prompts),
            tokens_per_s=rate,
            step_ms=statistics.median(steps) * 1e3,
            ratio=engine_tokens_per_s / rate,
        )

    def first_token_ms(self, prompt: list[int]) -> float | None:
        """Milliseconds from a request alone to its first token."""
        seconds = self._asked(lambda process, limit: process.first_token(prompt, limit))
        return None if seconds is None else seconds * 1e3

    def _asked(self, call: Callable[[PeerProcess, float], T]) -> T | None:
        """Call with the process and the seconds left; None if it failed now or before."""
        process = self._process
        return None if process is None else self._limited(lambda limit: call(process, limit))

    def _limited(self, call: Callable[[float], T]) -> T | None:
        """Call with the seconds left; None if it failed now or before."""
        if self.problem is not None:
            return None
        started = time.monotonic()
        try:
            return call(max(self._seconds_left, 0.0))
        except PeerError as error:
            self.problem = str(error)
            return None
        finally:
            self._seconds_left -= time.monotonic() - started


class SteadyPeer(DecodePeer):
    """A peer that has no steps to time, only a rate while all requests decode."""

    def row(
        self, prompts: list[list[int]], warm_up: int, num_steps: int, engine_tokens_per_s: float
    ) -> PeerRow | None:
        """Run all prompts to their ends."""
        answer = self._asked(lambda process, limit: process.steady(prompts, limit))
        if answer is None:
            return None
        rate, self.about["attention"] = answer
        ratio = engine_tokens_per_s / rate
        return PeerRow(len(prompts[0]), len(prompts), rate, None, ratio)


def median_first_token_ms(
    first_token_ms: Callable[[list[int]], float | None], prompts: list[list[int]]
) -> float | None:
    """The median over all prompts but the first; None if one of them has no time."""
    times = [first_token_ms(prompt) for prompt in prompts]
    known = [ms for ms in times if ms is not None]
    return statistics.median(known[1:]) if len(known) == len(times) else None
