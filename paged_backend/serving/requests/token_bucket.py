"""Limits how often something expensive is done."""

from __future__ import annotations

import time


class TokenBucket:
    """Token bucket: grants ``per_second`` actions per second on average.

    Unused actions are saved for later. Each call of :meth:`take` first limits the saved actions to
    ``burst`` or to ``wanted``, whichever is larger.
    """

    def __init__(self, per_second: float, burst: int = 0) -> None:
        self._per_second = per_second
        self._burst = burst
        self._last = time.monotonic()
        self._saved = 0.0

    def take(self, wanted: int) -> int:
        """Return how many of ``wanted`` actions are granted now."""
        now = time.monotonic()
        saved = self._saved + (now - self._last) * self._per_second
        self._saved = min(saved, max(wanted, self._burst))
        self._last = now
        granted = min(int(self._saved), wanted)
        self._saved -= granted
        return granted
