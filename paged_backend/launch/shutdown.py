"""Waits for a server that stops, and says what it waits for."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

from paged_backend.launch.http_get import http_get

_LOOK_INTERVAL_S = 1.0
# tritonserver 24.10 waits until its timeout for a stream if its client left with the last response.
# Without open requests, a server ends the processes of its models one after the other.
_QUIET_LOOKS = 4  # without an open request and without progress
_WITHOUT_ENGINE = re.compile(rb"^\w+[_:]engine_up\{[^}]*\} 0$", re.MULTILINE)
_OPEN = re.compile(rb"^\w+[_:]num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)


def wait_for_end(server: subprocess.Popen[bytes], metrics_url: str, timeout_s: float) -> bool:
    """Wait for a server that was asked to stop; says on stderr how many requests are open.

    Returns False if the caller should kill the server: after ``timeout_s``, or if it still waits
    though no request is open. Without metrics only the timeout counts.
    """
    deadline = time.monotonic() + timeout_s
    announced, quiet_looks, before = 0, 0, _children(server.pid)
    while time.monotonic() < deadline:
        try:
            server.wait(_LOOK_INTERVAL_S)
        except subprocess.TimeoutExpired:
            num_open, children = _num_open(metrics_url), _children(server.pid)
        else:
            return True
        if num_open and num_open != announced:
            announced = num_open
            _say(f"the server waits for open requests to end: {num_open}")
        quiet_looks = quiet_looks + 1 if num_open == 0 and children == before else 0
        before = children
        if quiet_looks == _QUIET_LOOKS:
            _say("no request is open, but the server does not stop; it is ended")
            return False
    return False


def _num_open(metrics_url: str) -> int | None:
    """The number of sequences that run or wait, of all models; None if it is unknown.

    Requests that wait for an engine to start again are not counted, so it is unknown then.
    """
    page = http_get(metrics_url, _LOOK_INTERVAL_S) or b""
    values = _OPEN.findall(page)
    if not values or _WITHOUT_ENGINE.search(page):
        return None
    return sum(int(float(value)) for value in values)


def _children(pid: int) -> set[str]:
    """The process ids of a process's children."""
    found: set[str] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(thread.read_text().split())
    return found


def _say(what: str) -> None:
    print(f"paged-backend: {what}", file=sys.stderr, flush=True)
