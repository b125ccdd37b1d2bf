"""Limits the requests per second of each tenant."""

from __future__ import annotations

from collections import OrderedDict

MAX_TENANTS = 2**16
"""Maximum number of tracked tenants; the one with the oldest admitted request is evicted first."""

_ROUNDING_S = 1e-6  # rounding error of sums of intervals


class TenantRateLimit:
    """A token bucket for each tenant.

    A full bucket allows a burst of as many requests as the rate allows in two seconds, or of one
    request if that is less than one. A bucket is stored as the time at which it is full again; full
    buckets are dropped.
    """

    def __init__(self, requests_per_s: float) -> None:
        self._interval_s = 1 / requests_per_s
        self._depth_s = max(2.0, self._interval_s)
        self._full_at_s: OrderedDict[str, float] = OrderedDict()  # the oldest admission first

    def __len__(self) -> int:
        return len(self._full_at_s)

    def admit(self, tenant: str, now_s: float) -> float | None:
        """Admit a request of a tenant, or refuse it; a refused request is not counted.

        Returns:
            None if the request is admitted, otherwise the seconds until one would be admitted.
        """
        self._forget(now_s)
        full_at_s = max(now_s, self._full_at_s.get(tenant, now_s)) + self._interval_s
        wait_s = full_at_s - now_s - self._depth_s
        if wait_s > _ROUNDING_S:
            return wait_s
        self._full_at_s[tenant] = full_at_s
        self._full_at_s.move_to_end(tenant)
        return None

    def _forget(self, now_s: float) -> None:
        while self._full_at_s:
            oldest = next(iter(self._full_at_s.values()))
            if oldest > now_s and len(self._full_at_s) <= MAX_TENANTS:
                break
            self._full_at_s.popitem(last=False)
