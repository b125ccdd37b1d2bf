"""The logger of all our code: lines for an operator, none per token, by default none per request.

In the engine's process lines go to stderr. In a front end they go to tritonserver's log. No kind of
line is written so often that a client could fill a disk.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from paged_backend.values.errors import place_of

LOG = logging.getLogger("paged_backend")
LEVELS = ("debug", "info", "warning", "error")
MAX_LINES = 20  # lines of one kind in an interval
INTERVAL_S = 10.0
MAX_KINDS = 256  # that are remembered; the oldest is forgotten first


@dataclass(slots=True)
class _Written:
    """The lines of one kind in the present interval."""

    began_s: float  # seconds of the monotonic clock
    number: int = 0
    num_left_out: int = 0


class LineLimit(logging.Filter):
    """Passes ``MAX_LINES`` lines of each kind in ``INTERVAL_S`` seconds, and counts further lines.

    Lines are of one kind if they have the same text before their arguments are filled in. The first
    line of a kind after others were left out says how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[str, _Written] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a line; may add to it how many were left out."""
        num_left_out = self._admit(str(record.msg), time.monotonic())
        if num_left_out is None:
            return False
        if num_left_out:
            record.msg = f"{record.getMessage()} ({num_left_out} such lines were left out)"
            record.args = ()
        return True

    def _admit(self, kind: str, now_s: float) -> int | None:
        """Return how many lines were left out before this one; None to leave out this one, too."""
        with self._lock:
            written = self._kinds.get(kind)
            left_out = 0
            if written is None or now_s >= written.began_s + INTERVAL_S:
                left_out = 0 if written is None else written.num_left_out
                written = self._kinds[kind] = _Written(now_s)
                self._kinds.move_to_end(kind)
                if len(self._kinds) > MAX_KINDS:
                    self._kinds.popitem(last=False)
            if written.number >= MAX_LINES:
                written.num_left_out += 1
                return None
            written.number += 1
            return left_out


_LIMIT = LineLimit()


def log_to(handler: logging.Handler, level: str) -> None:
    """Send the lines of this process to one handler.

    Args:
        handler: the destination; it replaces the one before.
        level: the least important level that is logged, one of ``LEVELS``.
    """
    LOG.handlers = [handler]
    handler.addFilter(_LIMIT)
    LOG.setLevel(level.upper())
    LOG.propagate = False


def log_to_stderr(level: str) -> None:
    """Send the lines of this process to stderr, which the launcher shows."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("paged-backend: %(message)s"))
    log_to(handler, level)


def write_internal_error(error: BaseException) -> None:
    """Write the type and place of an internal error of one request to stderr.

    This also works in models in a process that has no handler for ``LOG``.
    """
    record = LOG.makeRecord(LOG.name, logging.ERROR, "", 0, "internal error: %s", (), None)
    record.args = (place_of(error),)
    if _LIMIT.filter(record):
        print(f"paged-backend: {record.getMessage()}", file=sys.stderr, flush=True)
