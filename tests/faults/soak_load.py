"""Callers that ask one thing after the other, for as long as they are let."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from callers import Call
from paged_client import Client, Unavailable
from soak_calls import Caller, Known

from paged_backend.launch.server_process import RunningServer

Kinds = Mapping[str, tuple[int, Callable[[Caller], str | Call]]]
"""Name -> how often it comes among the others, and the request."""

_RETRY_S = 0.5  # before a caller who was refused asks again

MIXED: Kinds = {
    "gRPC stream": (6, Caller.stream),
    "gRPC in one piece": (2, Caller.whole),
    "gRPC n=2 sampled": (2, Caller.pair),
    "gRPC chat": (3, Caller.chat),
    "HTTP generate_stream": (3, Caller.http_stream),
    "HTTP generate": (2, Caller.http_whole),
    "cancelled": (2, Caller.cancel),
    "client vanishes": (2, Caller.vanish),
    "bad request": (2, Caller.bad),
    "timeout_s too short": (1, Caller.timed),
}
VANISHING: Kinds = {"client vanishes": (1, Caller.vanish)}
SLOW: Kinds = {"slow reader": (1, Caller.read_slowly)}


@dataclass
class Tally:
    """What has become of all requests so far."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, how it ended)
    lost: list[str] = field(default_factory=list)
    streams: list[Call] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: str, outcome: str | Call) -> None:
        """A request that ended as it had to, or was refused."""
        with self._lock:
            if isinstance(outcome, Call):
                self.streams.append(outcome)
                outcome = "right"
            self.outcomes[kind, outcome] += 1

    def note_lost(self, kind: str, error: Exception) -> None:
        """A request that did not."""
        with self._lock:
            self.outcomes[kind, "lost"] += 1
            self.lost.append(f"{kind}: {error!r}"[:500])

    def pauses(self, moments: Sequence[float]) -> list[float]:
        """How long streams stood still from each of these moments on."""
        return [pause.seconds for call in self.streams for pause in call.pauses(moments)]


class Load:
    """So many callers at once; each asks at least once, and again until ``end``."""

    _seeds = itertools.count()

    def __init__(
        self,
        server: RunningServer,
        known: Known,
        tally: Tally,
        num_callers: int,
        kinds: Kinds = MIXED,
    ) -> None:
        self._client = Client(server.grpc_url)
        self._tally = tally
        self._kinds = kinds
        self._ending = threading.Event()
        callers = [
            Caller(server, self._client, known, random.Random(next(self._seeds)))
            for _ in range(num_callers)
        ]
        self._threads = [threading.Thread(target=self._run, args=(caller,)) for caller in callers]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def end(self) -> None:
        """No more requests than are under way."""
        self._ending.set()

    def _run(self, caller: Caller) -> None:
        shares = [share for share, _ in self._kinds.values()]
        while True:
            (kind,) = caller.chance.choices(list(self._kinds), shares)
            was_refused = self._ask(caller, kind)
            if self._ending.wait(_RETRY_S if was_refused else 0):
                return

    def _ask(self, caller: Caller, kind: str) -> bool:
        """Whether the server refused the request, as a full one may."""
        _, act = self._kinds[kind]
        try:
            self._tally.note(kind, act(caller))
        except Unavailable as error:
            if str(error).startswith("queue_full: "):
                self._tally.note(kind, "refused")
                return True
            self._tally.note_lost(kind, error)
        except Exception as error:
            self._tally.note_lost(kind, error)
        return False
