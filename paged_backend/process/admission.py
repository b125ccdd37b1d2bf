"""Decides whether a request may wait, and if not, when the client should retry."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paged_backend.values.errors import RequestRefused
from paged_backend.values.options.limits import LimitOptions
from paged_backend.values.outputs import QueueState
from paged_backend.values.validation import shorten

MAX_RETRY_AFTER_S = 60
MAX_BLOCKED_TENANTS = 2**12  # that a front end remembers; the engine refuses the others
PLACES_FOR_ONE_LEFT = 8  # waiting requests that a tenant may have for each free place


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """The limits of the waiting queue.

    ``max_waiting_requests`` does not count the requests that the engine can start at once.
    """

    max_waiting_requests: int
    max_waiting_tokens: int

    @classmethod
    def of(cls, config: LimitOptions) -> QueueBounds:
        """Return the limits in an engine's options."""
        return cls(config.max_waiting_requests, config.max_waiting_tokens)

    def check(self, queue: QueueState, num_tokens: int, retry_after_s: int) -> None:
        """Accept a request of ``num_tokens`` tokens if it can start at once or the queue has room.

        An empty queue has room for a request of any size.

        Raises:
            RequestRefused: the queue is full.
        """
        num_waiting = queue.num_waiting - queue.num_free_seqs
        if num_waiting < 0:
            return
        if num_waiting >= self.max_waiting_requests:
            limit = f"{queue.num_waiting} requests wait already (max_waiting_requests)"
        elif queue.num_waiting and queue.num_waiting_tokens + num_tokens > self.max_waiting_tokens:
            limit = f"{queue.num_waiting_tokens} tokens wait already (max_waiting_tokens)"
        else:
            return
        raise _full(limit, retry_after_s)

    def check_share(self, queue: QueueState, num_own: int, retry_after_s: int) -> None:
        """Accept a request of a tenant if the queue has enough free places for other tenants.

        ``num_own`` is the number of the tenant's requests that wait already. It may be at most
        ``PLACES_FOR_ONE_LEFT`` times the number of free places. So a tenant that sends too many
        requests can fill about 8/9 of the queue.

        Raises:
            RequestRefused: the tenant has used its share of the queue.
        """
        num_free = self.max_waiting_requests + queue.num_free_seqs - queue.num_waiting
        if num_own > PLACES_FOR_ONE_LEFT * num_free:
            limit = f"{num_own} requests of this tenant wait already (max_waiting_requests)"
            raise _full(limit, retry_after_s)


def _full(limit: str, retry_after_s: int) -> RequestRefused:
    return RequestRefused("queue_full", f"{limit}; retry after {max(1, retry_after_s)} s")


def rate_limited(tenant: str, wait_s: float) -> RequestRefused:
    """Return the error for a tenant that is over its rate and may retry in ``wait_s`` seconds."""
    return RequestRefused(
        "rate_limited",
        f"tenant {shorten(tenant)} is over max_tenant_request_rate; "
        f"retry after {math.ceil(wait_s)} s",
    )


class BlockedTenants:
    """The tenants that the engine refuses at present, so that a front end need not ask again.

    Times are in seconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def block(self, tenant: str, until_s: float, now_s: float) -> None:
        """Refuse a tenant's requests until ``until_s``."""
        if len(self._until_s) >= MAX_BLOCKED_TENANTS:
            self._until_s = {name: at for name, at in self._until_s.items() if at > now_s}
        if len(self._until_s) < MAX_BLOCKED_TENANTS:
            self._until_s[tenant] = until_s

    def check(self, tenant: str, now_s: float) -> None:
        """Accept a tenant that is not blocked.

        Raises:
            RequestRefused: the tenant is blocked; the error says when to retry.
        """
        wait_s = self._until_s.get(tenant, now_s) - now_s
        if wait_s > 0:
            raise rate_limited(tenant, wait_s)


class ThroughputEstimate:
    """The rate at which requests finish, as an exponential moving average over ``WINDOW_S``.

    A request with ``n`` completions counts as ``n`` requests.
    """

    WINDOW_S = 5.0

    def __init__(self) -> None:
        self._per_s = 0.0
        self._last_s: float | None = None
        self._last_count = 0

    def note(self, num_finished: int, now_s: float) -> None:
        """Record the number of requests that have finished since the engine started."""
        if self._last_s is None:
            self._last_s = now_s
        seconds = now_s - self._last_s
        if seconds < 0.1:
            return
        share = 1 - math.exp(-seconds / self.WINDOW_S)
        self._per_s += share * ((num_finished - self._last_count) / seconds - self._per_s)
        self._last_s, self._last_count = now_s, num_finished

    def seconds_for(self, num_requests: int) -> int:
        """Return the seconds until ``num_requests`` have finished, at most MAX_RETRY_AFTER_S."""
        if num_requests >= self._per_s * MAX_RETRY_AFTER_S:
            return MAX_RETRY_AFTER_S
        return math.ceil(num_requests / self._per_s)
