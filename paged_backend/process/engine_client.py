"""A front-end's way to the engine: starts it if nobody has, sends requests, receives outputs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import zmq

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError, EngineDead
from paged_backend.process import wire
from paged_backend.process.lifetime import exclusive, open_process, runtime_folder
from paged_backend.request import Request


def connect(
    config: EngineConfig, model: str, version: str, server_pid: int
) -> tuple[EngineClient, wire.EngineReady]:
    """A front-end's way to the engine of a model with these options, which then is ready.

    Raises:
        ConfigError: the engine cannot be started with these options.
    """
    while True:
        run_dir = runtime_folder(server_pid, model, version, _fingerprint(config, model))
        client = EngineClient(config, run_dir, server_pid)
        try:
            return client, client.wait_until_ready()
        except EngineDead as error:
            client.close()
            # One that was found may have been about to end with its last front-end.
            if client.has_started:
                raise ConfigError(
                    f"the engine ended while the model was loading: {error}"
                ) from error


class EngineClient:
    """One front-end's connection.

    ``receive`` belongs to one thread; every other method may be called from any.
    """

    def __init__(self, config: EngineConfig, run_dir: Path, server_pid: int) -> None:
        self._pidfd, self.has_started = _start_or_find(config, run_dir, server_pid)
        # Not to be guessed: whoever knows the name of a request can cancel it.
        self.identity = f"{os.getpid()}-{uuid.uuid4().hex[:16]}"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._lock = threading.Lock()  # a ZeroMQ socket is not thread-safe
        self._requests = context.socket(zmq.PUSH)
        self._outputs = context.socket(zmq.DEALER)
        self._outputs.identity = self.identity.encode()
        self._early: list[wire.FromEngine] = []  # came together with EngineReady
        self._poller = zmq.Poller()
        self._poller.register(self._outputs, zmq.POLLIN)
        self._poller.register(self._pidfd, zmq.POLLIN)
        for socket, name in (
            (self._requests, wire.REQUESTS_SOCKET),
            (self._outputs, wire.OUTPUTS_SOCKET),
        ):
            socket.set_hwm(0)
            socket.connect(wire.address(run_dir, name))

    def wait_until_ready(self) -> wire.EngineReady:
        """Wait for the model to be loaded, however long that takes.

        Raises:
            ConfigError: the engine cannot be started with these options.
            EngineDead: the engine has ended without a word.
        """
        self._outputs.send(wire.encode(wire.Hello(os.getpid())))
        while True:
            messages = self.receive(timeout_s=1.0)
            for index, message in enumerate(messages):
                if isinstance(message, wire.EngineFailed):
                    raise ConfigError(message.message)
                if isinstance(message, wire.EngineReady):
                    self._early = messages[index + 1 :]
                    return message

    def add_request(self, request: Request) -> None:
        """Send a checked request."""
        self._send(wire.AddRequest(request))

    def abort_request(self, request_id: str) -> None:
        """End a request before the engine's next step."""
        self._send(wire.AbortRequest(request_id))

    def stop_answer(self, request_id: str, index: int) -> None:
        """End an answer whose text has come to a stop string."""
        self._send(wire.StopAnswer(request_id, index))

    def inspect(self, request_id: str) -> None:
        """Ask what the engine holds."""
        self._send(wire.Inspect(request_id))

    def cancel_request(self, request_id: str) -> None:
        """End a request of any front-end, which hears of it by the last outputs."""
        self._send(wire.CancelRequest(request_id))

    def receive(self, timeout_s: float) -> list[wire.FromEngine]:
        """All messages that are there; waits for the first.

        Raises:
            EngineDead: the engine's process has ended and everything it said was received.
        """
        messages, self._early = self._early, []
        ready = dict(self._poller.poll(0 if messages else int(timeout_s * 1000)))
        while self._outputs.poll(0):
            messages.append(wire.decode_from_engine(self._outputs.recv()))
        if not messages and self._pidfd in ready:
            raise EngineDead("its process is gone; the server's log may say why")
        return messages

    def close(self) -> None:
        """Leave; the engine aborts what is open and ends after its last front-end."""
        self._send(wire.Goodbye())
        for socket in (self._requests, self._outputs):
            socket.close(linger=1000)

    def _send(self, message: wire.ToEngine) -> None:
        with self._lock:
            self._requests.send_multipart([self.identity.encode(), wire.encode(message)])


def _fingerprint(config: EngineConfig, model: str) -> str:
    """What differs between engines that must not be shared: options, GPUs, and the whole name."""
    facts = [dataclasses.asdict(config), os.environ.get("CUDA_VISIBLE_DEVICES"), model]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]


def _start_or_find(config: EngineConfig, run_dir: Path, server_pid: int) -> tuple[int, bool]:
    """A pidfd of the engine that lives in ``run_dir``, and whether this call has started it."""
    pid_file = run_dir / "engine.pid"
    with exclusive(run_dir / "lock"):
        if pid_file.exists():
            pidfd = open_process(int(pid_file.read_text()))
            # One that has ended is there until its parent, another front-end, looks after it.
            if pidfd is not None and not select.select([pidfd], [], [], 0)[0]:
                return pidfd, False
        process = _start(config, run_dir, server_pid)
        pid_file.write_text(str(process.pid))
        return os.pidfd_open(process.pid), True


def _start(config: EngineConfig, run_dir: Path, server_pid: int) -> subprocess.Popen[bytes]:
    """Start the engine with this interpreter."""
    command = [
        *(sys.executable, "-m", "paged_backend.process.engine_process"),
        *("--run-dir", str(run_dir), "--server-pid", str(server_pid)),
        *("--config", json.dumps(dataclasses.asdict(config))),
    ]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)
