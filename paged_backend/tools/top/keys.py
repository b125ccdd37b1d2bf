"""Reads keys as they are pressed."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from typing import Any, Self


class Keys:
    """Reads keys without echo and without waiting for Enter; none if stdin is not a terminal."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._before: list[Any] | None = None

    def wait(self, seconds: float) -> str:
        """Wait up to `seconds` for keys and return them, or an empty string."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        return os.read(self._fd, 64).decode(errors="replace") if ready else ""

    def __enter__(self) -> Self:
        if os.isatty(self._fd):
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
