"""Counts the constraints of each tenant that used up their time or ended their process."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque

from paged_backend.values.errors import RequestRefused
from paged_backend.values.validation import shorten

WINDOW_S = 60.0  # for which an offense counts
MAX_OFFENSES = 3  # offenses of a tenant in the window; its other new constraints are refused then
MAX_TENANTS = 2**12  # with remembered offenses; the oldest are forgotten first
# Processor time of a new constraint without a tenant while there are many offenses without one. All
# such clients cannot be refused for what one of them does. Real schemas take milliseconds.
SHORT_LIMIT_S = 0.1


class Offenses:
    """The offenses of the last ``WINDOW_S`` seconds; used under a lock of the caller."""

    def __init__(self) -> None:
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, tenant: str) -> None:
        """Count an offense."""
        self._times.setdefault(tenant, deque(maxlen=MAX_OFFENSES)).append(time.monotonic())
        self._times.move_to_end(tenant)
        if len(self._times) > MAX_TENANTS:
            self._times.popitem(last=False)

    def has_any(self, tenant: str) -> bool:
        """Return True if the tenant has an offense."""
        return bool(self._recent(tenant))

    def time_limit_s(self, tenant: str) -> float | None:
        """Return the processor time of a tenant's next constraint; None for the usual limit.

        Raises:
            RequestRefused: the tenant has too many offenses. Clients without a tenant are not
                refused, but get less time.
        """
        times = self._recent(tenant)
        if len(times) < MAX_OFFENSES:
            return None
        if not tenant:
            return SHORT_LIMIT_S
        raise RequestRefused(
            "rate_limited",
            f"{MAX_OFFENSES} structured outputs of tenant {shorten(tenant)} took too much time in "
            f"the last {WINDOW_S:g} s; retry after {self._wait_s(times)} s",
        )

    def refusal(self, tenant: str) -> RequestRefused:
        """Return the error for a constraint that took more than ``SHORT_LIMIT_S``."""
        return RequestRefused(
            "rate_limited",
            f"schema_timeout: structured outputs without a tenant have {SHORT_LIMIT_S:g} s at "
            f"present, because {MAX_OFFENSES} took too much time in the last {WINDOW_S:g} s; "
            f"retry after {self._wait_s(self._recent(tenant))} s",
        )

    def _recent(self, tenant: str) -> deque[float]:
        times = self._times.get(tenant, deque())
        while times and times[0] < time.monotonic() - WINDOW_S:
            times.popleft()
        return times

    def _wait_s(self, times: deque[float]) -> int:
        return max(1, math.ceil(times[0] + WINDOW_S - time.monotonic())) if times else 1
