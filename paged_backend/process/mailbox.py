"""The sockets of an engine, and the processes that it watches."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from paged_backend.process import wire
from paged_backend.process.lifetime import ProcessId, open_process

MAX_MESSAGES = 256  # messages that are handled before a step, so that no flood stops the steps
SERVER = ""  # stands for the server among the names of the front ends


class Mailbox:
    """The two sockets of the engine, and the processes that it watches."""

    def __init__(self, run_dir: Path, server: ProcessId) -> None:
        self.run_dir = run_dir
        self._context = context = zmq.Context()
        self._poller = zmq.Poller()
        self._requests = context.socket(zmq.PULL)
        self._outputs = context.socket(zmq.ROUTER)
        self._sockets = {wire.REQUESTS_SOCKET: self._requests, wire.OUTPUTS_SOCKET: self._outputs}
        for name, socket in self._sockets.items():
            socket.set_hwm(0)  # a step never waits; the number of open requests bounds the queue
            socket.bind(wire.address(run_dir, name))
            self._poller.register(socket, zmq.POLLIN)
        self._watched: dict[int, str] = {}  # pidfd -> front end, "" for the server
        self._gone: list[str] = []  # owners of processes that ended before they were watched
        self.watch(server, SERVER)

    def watch(self, process: ProcessId, owner: str) -> None:
        """Watch a process: when it ends, ``receive`` returns a Goodbye from ``owner``."""
        pidfd = open_process(process)
        if pidfd is None:
            self._gone.append(owner)
        else:
            self._watched[pidfd] = owner
            self._poller.register(pidfd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[str, wire.ToEngine]]:
        """Wait for a message, and return those that have arrived, each with its front end.

        At most ``MAX_MESSAGES`` are returned; the others wait for the next call.
        """
        messages: list[tuple[str, wire.ToEngine]] = [(who, wire.Goodbye()) for who in self._gone]
        self._gone.clear()
        for ready, _ in self._poller.poll(0 if messages else int(timeout_s * 1000)):
            if isinstance(ready, int):
                self._poller.unregister(ready)
                os.close(ready)
                messages.append((self._watched.pop(ready), wire.Goodbye()))
            else:
                messages += _drain(ready)
        return messages

    def send(self, front_end: str, message: wire.FromEngine) -> None:
        """Queue a message; it is dropped if the front end has ended."""
        self._outputs.send_multipart([front_end.encode(), wire.encode(message)])

    def close(self) -> None:
        """Send what is queued, for at most a second, and close the sockets."""
        for socket in self._sockets.values():
            socket.close(linger=1000)
        self._context.term()


def _drain(socket: zmq.Socket[bytes]) -> list[tuple[str, wire.ToEngine]]:
    """Return the messages that have arrived; of more than ``MAX_MESSAGES``, the first ones."""
    messages: list[tuple[str, wire.ToEngine]] = []
    while len(messages) < MAX_MESSAGES and socket.poll(0):
        sender, payload = socket.recv_multipart()
        messages.append((sender.decode(), wire.decode_to_engine(payload)))
    return messages
