"""A front end's connection to one engine process, which it starts if none runs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from paged_backend.process import wire
from paged_backend.process.lifetime import (
    ProcessId,
    end_enrolled,
    enrol,
    exclusive,
    open_process,
    runtime_folder,
)
from paged_backend.process.status_page import StatusPage
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import EngineDead
from paged_backend.values.outputs import EngineStats
from paged_backend.values.server_memory import without_heap_variables

ENGINE = ("-m", "paged_backend.process.engine_process")
"""What an engine's process runs; `loadtest/front_end_cost.py` has one without a model."""

GONE = "its process is gone; the server's log may say why"
_KILL_S = 5.0  # a process may have much memory to give back
_LONGEST_LOOK_S = 1.0  # a longer interval means that this process slept, not the engine


class EngineClient:
    """The connection of one front end to one engine process, until that process ends.

    One thread may call ``receive`` while another calls ``send``. The constructor does not wait for
    the engine, which is ready when ``receive`` returns EngineReady.

    Args:
        config: the engine's options.
        model: the model's name.
        version: the model's version.
        server: the tritonserver process; the engine ends when this process ends.
        counts: the last counts that this front end received from a previous engine, if any.
        commits: options that replace those of ``config`` in an engine that is started: what a
            previous engine loaded, although its branch on the Hub may have moved since.
        number: number of the engine among those of the model, counted from 0.

    Attributes:
        folder: the private folder of the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: str,
        version: str,
        server: ProcessId,
        counts: EngineStats | None,
        commits: Mapping[str, Any],
        number: int,
    ) -> None:
        run_dir = runtime_folder(server, model, version, _fingerprint(config, model, number))
        self.folder = run_dir
        enrol(run_dir)
        self._pidfd, self._process = _start_or_find(
            dataclasses.replace(config, **commits), run_dir, server, number
        )
        self._end = select.poll()  # for `send`; the poller belongs to `receive`
        self._end.register(self._pidfd, select.POLLIN)
        self._identity = uuid.uuid4().hex.encode()
        self._page: StatusPage | None = None  # once the engine is ready
        self._watch = _HeartbeatWatch()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._requests = context.socket(zmq.PUSH)
        self._outputs = context.socket(zmq.DEALER)
        self._outputs.identity = self._identity
        self._poller = zmq.Poller()
        self._poller.register(self._outputs, zmq.POLLIN)
        self._poller.register(self._pidfd, zmq.POLLIN)
        for socket, name in (
            (self._requests, wire.REQUESTS_SOCKET),
            (self._outputs, wire.OUTPUTS_SOCKET),
        ):
            socket.set_hwm(0)
            socket.connect(wire.address(run_dir, name))
        self._outputs.send(wire.encode(wire.Hello(str(ProcessId.of(os.getpid())), counts)))

    @property
    def has_started(self) -> bool:
        """Whether this front end started the engine, rather than found it running."""
        return self._process is not None

    @property
    def exit_status(self) -> str:
        """How the engine ended; "no exit status" if it runs or another process started it."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return "no exit status"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    @property
    def waitables(self) -> tuple[zmq.Socket[bytes], int]:
        """The socket and the file descriptor that are readable when ``receive`` has news."""
        return self._outputs, self._pidfd

    @property
    def page(self) -> StatusPage | None:
        """The engine's status page; None until the engine is ready."""
        return self._page

    def send(self, message: wire.ToEngine) -> bool:
        """Queue a message; returns False, and drops it, if the engine has ended."""
        if self._end.poll(0):
            return False
        self._requests.send_multipart([self._identity, wire.encode(message)])
        return True

    def receive(self, timeout_s: float) -> list[wire.FromEngine]:
        """Wait for a message, and return all that have arrived.

        Raises:
            EngineDead: the engine's process has ended, and all its messages were returned.
        """
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        messages = []
        while self._outputs.poll(0):
            messages.append(wire.decode_from_engine(self._outputs.recv()))
        if not messages and self._pidfd in ready:
            raise EngineDead(GONE)
        if self._page is None and any(isinstance(m, wire.EngineReady) for m in messages):
            self._page = StatusPage.open(self.folder)
        return messages

    def seconds_without_beat(self) -> float:
        """Seconds since the engine's loop last completed an iteration; 0 until it is ready."""
        return 0.0 if self._page is None else self._watch.look(self._page.beat)

    def kill(self) -> None:
        """Kill the engine, and wait a few seconds at most until it has ended.

        Another front end may have killed it already.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            select.select([self._pidfd], [], [], _KILL_S)

    def kill_all(self) -> None:
        """Kill the engine and all its front ends, including this one."""
        self.kill()
        end_enrolled(self.folder)

    def close(self) -> None:
        """Disconnect from the engine.

        The engine aborts the open requests of this front end. It ends after its last front end has
        disconnected.
        """
        self.send(wire.Goodbye())
        self._disconnect(linger_ms=1000)

    def abandon(self) -> None:
        """Disconnect from an engine that has ended, so that no message reaches the next one."""
        self._disconnect(linger_ms=0)
        if self._process is not None:
            self._process.poll()  # so that it does not stay a zombie

    def _disconnect(self, linger_ms: int) -> None:
        for socket in (self._requests, self._outputs):
            socket.close(linger=linger_ms)
        os.close(self._pidfd)
        if self._page is not None:
            self._page.close()


class _HeartbeatWatch:
    """Measures how long a heartbeat has not changed while this process was running."""

    def __init__(self) -> None:
        self._beat = 0
        self._still_s = 0.0
        self._last_s = time.monotonic()

    def look(self, beat: int) -> float:
        now = time.monotonic()
        self._still_s += min(now - self._last_s, _LONGEST_LOOK_S)
        if beat != self._beat:
            self._still_s = 0.0
        self._beat, self._last_s = beat, now
        return self._still_s


def _fingerprint(config: EngineConfig, model: str, number: int) -> str:
    """Return a digest of everything that front ends must agree on to share an engine."""
    facts = [dataclasses.asdict(config), os.environ.get("CUDA_VISIBLE_DEVICES"), model, number]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]


def _start_or_find(
    config: EngineConfig, run_dir: Path, server: ProcessId, number: int
) -> tuple[int, subprocess.Popen[bytes] | None]:
    """Return a pidfd of the engine in ``run_dir``, and its process if this call started it."""
    pid_file = run_dir / "engine.pid"
    with exclusive(run_dir / "lock"):
        pidfd = _find(pid_file)
        if pidfd is not None:
            return pidfd, None
        process = _start(config, run_dir, server, number)
        try:
            pid_file.write_text(str(ProcessId.of(process.pid)))
        except OSError:  # nobody would find it
            process.kill()
            process.wait()
            raise
        return os.pidfd_open(process.pid), process


def _find(pid_file: Path) -> int | None:
    """Return a pidfd of the engine that is recorded in ``pid_file``; None if it has ended."""
    try:
        pidfd = open_process(ProcessId.parse(pid_file.read_text()))
    except (FileNotFoundError, ValueError):
        return None
    # An engine that has ended stays a zombie until its parent, another front end, waits for it.
    if pidfd is not None and select.select([pidfd], [], [], 0)[0]:
        os.close(pidfd)
        return None
    return pidfd


def _start(
    config: EngineConfig, run_dir: Path, server: ProcessId, number: int
) -> subprocess.Popen[bytes]:
    """Start the engine with this interpreter; -P keeps it from importing the working directory."""
    command = [
        *(sys.executable, "-P", *ENGINE),
        *("--run-dir", str(run_dir), "--server", str(server)),
        *("--number", str(number), "--config", json.dumps(dataclasses.asdict(config))),
    ]
    environment = without_heap_variables(os.environ)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
