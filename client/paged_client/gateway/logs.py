"""The gateway's log, with a limit on the rate of lines, because clients can cause most of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

INTERVAL_S = 10.0
MAX_LIKE_LINES = 5  # lines of one logger with one message in an interval
MAX_LINES = 50  # lines of all loggers in an interval


class RateLimit(logging.Filter):
    """Drops lines beyond a number per interval; the next line has the number of dropped ones."""

    def __init__(self) -> None:
        super().__init__()
        self._ends_at = 0.0
        self._written: Counter[tuple[str, str]] = Counter()
        self._num_dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is written."""
        now = time.monotonic()
        if now >= self._ends_at:
            self._ends_at = now + INTERVAL_S
            self._written.clear()
        kind = record.name, str(record.msg)
        if self._written.total() >= MAX_LINES or self._written[kind] >= MAX_LIKE_LINES:
            self._num_dropped += 1
            return False
        self._written[kind] += 1
        if self._num_dropped:
            record.msg = f"{record.getMessage()} ({self._num_dropped} more lines were left out)"
            record.args = ()
            self._num_dropped = 0
        return True


def log_config() -> dict[str, Any]:
    """Return the configuration of all loggers, for ``logging.config.dictConfig``."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"rate": {"()": RateLimit}},
        "formatters": {"lines": {"format": "%(levelname)s: %(message)s"}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "lines",
                "filters": ["rate"],
            }
        },
        "root": {"handlers": ["stderr"], "level": "WARNING"},
    }
