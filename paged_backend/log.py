"""The logger of all our code: lines for an operator, none per token, by default none per request.

In the engine's process lines go to stderr. In a front end they go to tritonserver's log.
"""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("paged_backend")
LEVELS = ("debug", "info", "warning", "error")


def log_to(handler: logging.Handler, level: str) -> None:
    """Send the lines of this process to one handler.

    Args:
        handler: the destination; it replaces the one before.
        level: the least important level that is logged, one of ``LEVELS``.
    """
    LOG.handlers = [handler]
    LOG.setLevel(level.upper())
    LOG.propagate = False


def log_to_stderr(level: str) -> None:
    """Send the lines of this process to stderr, which the launcher shows."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("paged-backend: %(message)s"))
    log_to(handler, level)
