"""Logs refused requests at a limited rate."""

from __future__ import annotations

from collections import Counter

from paged_backend.values.log import LOG

INTERVAL_S = 10.0


class RefusalLog:
    """Writes the first refusal at once, and later ones as a sum every ``INTERVAL_S`` seconds."""

    def __init__(self) -> None:
        self._written: Counter[str] = Counter()
        self._due_s = 0.0

    def write(self, refused: Counter[str], now_s: float) -> None:
        """Log what was refused since the last line, if a line is due.

        Args:
            refused: all refused requests so far, by reason; it may grow in other threads.
            now_s: the time of the monotonic clock.
        """
        if now_s < self._due_s:
            return
        now = Counter(dict(refused))  # a copy, as others go on counting
        new = now - self._written
        if not new:
            return
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(new.items()))
        LOG.warning("refused calls: %s", reasons)
        self._written = now
        self._due_s = now_s + INTERVAL_S
