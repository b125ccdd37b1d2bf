"""Notices that the server shuts down, and ends open requests in time.

A server that shuts down calls ``finalize`` only after the last request has ended. When its exit
timeout is over, it drops open requests without an error, and sometimes crashes. So this model
checks whether the server shuts down, and ends all requests before the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from paged_backend.process.lifetime import is_stopping
from paged_backend.values.errors import RequestRefused

LOOK_INTERVAL_S = 0.25
_SURE = 2  # consecutive observations of a shutdown before it is believed
_SPARE_S = 3.0  # part of the server's exit timeout that is kept for everything else
_PER_INSTANCE_S = 1.5  # instances are finalized one after the other


class Drain:
    """Decides when no more requests are accepted, and when open requests must end.

    Args:
        server_pid: the process id of tritonserver.
        limit_s: how long requests may continue after the shutdown was noticed.
        announce: is called with the number of open requests, each second during the shutdown.
    """

    def __init__(self, server_pid: int, limit_s: float, announce: Callable[[int], None]) -> None:
        self._server_pid = server_pid
        self._limit_s = limit_s
        self._announce = announce
        self._next_look_s = 0.0
        self._signs = 0
        self._announced_s = 0.0
        self._until_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the server shuts down."""
        return self._until_s is not None

    def is_over(self, num_open: int) -> bool:
        """Check whether the server shuts down, and return whether open requests must end now.

        Call it often; it looks at the server every ``LOOK_INTERVAL_S`` at most. Open requests must
        end once ``limit_s`` has passed since the shutdown was noticed.
        """
        now = time.monotonic()
        if self._until_s is None:
            self._look(now)
            return False
        if num_open and now >= self._announced_s + 1:
            self._announced_s = now
            self._announce(num_open)
        return now >= self._until_s

    def refusal(self) -> RequestRefused:
        """The error for clients."""
        return RequestRefused("draining", "the server stops")

    def _look(self, now: float) -> None:
        if now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_INTERVAL_S
        self._signs = self._signs + 1 if is_stopping(self._server_pid) else 0
        if self._signs >= _SURE:
            self._until_s = now + self._limit_s


def drain_limit_s(drain_timeout_s: float, exit_timeout_s: float, num_instances: int) -> float:
    """Return how long requests may continue, so that the server ends within its exit timeout."""
    return max(
        0.0, min(drain_timeout_s, exit_timeout_s - _SPARE_S - _PER_INSTANCE_S * num_instances)
    )
