"""The way to the process that renders chat templates: starts it, and again after its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from paged_backend.errors import InvalidRequest
from paged_backend.text.template_process import TIME_LIMIT_S
from paged_backend.validation import shorten


class TemplateClient:
    """Renders one template at a time; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # of the process, at this object's end too

    def start(self) -> None:
        """Have the process ready for the first request; it takes a second to start."""
        with self._lock:
            self._running()

    def render(self, arguments: Mapping[str, Any]) -> str:
        """What `transformers` makes of a template.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long or too much.
        """
        line = json.dumps(arguments).encode() + b"\n"
        with self._lock:
            process = self._running()
            reply = _exchange(process, line)
            if not reply:
                reply = _epitaph(process.wait())
                self._running()  # the next one need not wait for a new process
        answer = json.loads(reply)
        if "problem" in answer:
            raise InvalidRequest("messages", shorten(answer["problem"], 240, quote=False))
        return str(answer["text"])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = _start()
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paged_backend.text.template_process"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """The answer to a line; empty where the process ended over it."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _epitaph(status: int) -> bytes:
    if status == -signal.SIGPROF:
        problem = f"the chat template took over {TIME_LIMIT_S:g} s"
    else:
        problem = f"the chat template ended its process (exit status {status})"
    return json.dumps({"problem": problem}).encode()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # waits, and closes the pipes
