"""Callers of a server that is being hurt: what each asked, what it heard, and when."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from paged_client import Chunk, Client, ClientError, Completion, CompletionBuilder, Prompt

from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.demo import load_questions

QUESTIONS = [question.question for question in load_questions()]
_ON_ITS_WAY_S = 1.0  # for so long tokens may be heard that were sent before the engine's end


@dataclass(frozen=True)
class Ask:
    """One request; ``whole`` is one that is answered in one piece."""

    prompt: Prompt
    params: dict[str, Any]
    whole: bool = False


def greedy(index: int, max_tokens: int) -> Ask:
    """A request whose answer is so long, and the same each time."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return Ask(QUESTIONS[index], params)


class Pause(NamedTuple):
    """A gap in a stream, and the number of faults that fell into it."""

    seconds: float
    num_faults: int


@dataclass
class Call:
    """One caller, while it asks and afterwards."""

    ask: Ask
    timeout_s: float
    arrivals: list[float] = field(default_factory=list)  # by the monotonic clock; the asking first
    num_tokens: int = 0
    completion: Completion | None = None
    error: ClientError | None = None
    _builder: CompletionBuilder = field(default_factory=CompletionBuilder)

    def run(self, client: Client) -> Self:
        """Ask, and listen to the end."""
        self.arrivals.append(time.monotonic())
        ask = self.ask
        try:
            with client.stream(
                ask.prompt, whole=ask.whole, timeout=self.timeout_s, **ask.params
            ) as stream:
                for chunk in stream:
                    self._hear(chunk)
            self.completion = self._builder.build()
        except ClientError as error:
            self.error = error
        return self

    @property
    def has_ended(self) -> bool:
        """Whether the caller has heard the last."""
        return self.completion is not None or self.error is not None

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """The tokens of each answer; raises the error, if there was one."""
        if self.completion is None:
            raise self.error or AssertionError("the request has not ended")
        return [answer.token_ids for answer in self.completion.answers]

    def pauses(self, moments: Iterable[float]) -> list[Pause]:
        """The largest gap after each of these moments at which the stream was open."""
        gaps = list(zip(self.arrivals, self.arrivals[1:], strict=False))
        largest: Counter[tuple[float, float]] = Counter()
        for moment in moments:
            around = [gap for gap in gaps if moment < gap[1] and gap[0] < moment + _ON_ITS_WAY_S]
            if around and self.arrivals[0] < moment:
                largest[max(around, key=lambda gap: gap[1] - gap[0])] += 1
        return [Pause(end - start, number) for (start, end), number in largest.items()]

    def _hear(self, chunk: Chunk) -> None:
        self.arrivals.append(time.monotonic())
        self.num_tokens += chunk.num_output_tokens
        self._builder.add(chunk)


class Crowd:
    """Callers that ask at the same time, each in a thread of its own, while something happens."""

    def __init__(
        self, server: RunningServer, asks: Sequence[Ask], *, timeout_s: float = 240.0
    ) -> None:
        self.calls = [Call(ask, timeout_s) for ask in asks]
        self._client = Client(server.grpc_url)
        self._pool = ThreadPoolExecutor(len(asks))

    def __enter__(self) -> Self:
        self._ended = [self._pool.submit(call.run, self._client) for call in self.calls]
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for all to end; a test that failed does not wait."""
        if exception[0] is not None:
            self.hang_up()
        self._pool.shutdown()
        self.hang_up()
        for ended in self._ended:
            ended.result()  # raises what is no ClientError

    def hang_up(self) -> None:
        """End what is still open."""
        self._client.close()

    @property
    def streams(self) -> list[Call]:
        """The requests that hear more than their end."""
        return [call for call in self.calls if not call.ask.whole]

    def have_tokens(self, number: int) -> bool:
        """Whether each stream has come so far."""
        return all(call.num_tokens >= number or call.has_ended for call in self.streams)

    @property
    def num_complete(self) -> int:
        """Requests that have their whole answer."""
        return sum(call.completion is not None for call in self.calls)

    @property
    def num_tokens(self) -> int:
        """Tokens that all have heard so far."""
        return sum(call.num_tokens for call in self.calls)


def quantile(values: Iterable[float], part: float) -> float:
    """The smallest value that so large a part of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def print_pauses(what: str, pauses: Iterable[float]) -> None:
    """Show how long streams stood still (for `pytest -s`)."""
    values = list(pauses)
    if values:
        p50, p99, most = (quantile(values, part) for part in (0.5, 0.99, 1))
        print(f"{what}: {len(values)} pauses, p50 {p50:.1f} s, p99 {p99:.1f} s, max {most:.1f} s")


def ask_all(server: RunningServer, asks: Sequence[Ask]) -> list[Call]:
    """The requests of all these, undisturbed."""
    with Crowd(server, asks) as crowd:
        pass
    return crowd.calls
