"""The connections to ranks on this host, and their processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from paged_backend.engine.rank_loop import address
from paged_backend.engine.rank_processes import RankProcesses
from paged_backend.values.errors import EngineDead

FOLDERS = "/tmp"  # where private folders of sockets are made: the path of a socket must be short


class LocalRanks:
    """Starts ranks on this host, and passes messages to them and from them.

    Args:
        context: makes the socket.
        folder: a private folder for the socket.
        ranks: the numbers of the ranks.

    Attributes:
        ranks: the numbers of the ranks.
        sources: the socket, and a file descriptor that is readable once a rank has ended.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, ranks: Sequence[int]
    ) -> None:
        self.ranks = ranks
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(address(folder))
        self._processes = RankProcesses(folder, ranks)
        self.sources: tuple[Any, ...] = (self._socket, self._processes.ended)

    def wait_until_started(self, timeout_s: float) -> None:
        """Wait until all processes are connected.

        Raises:
            EngineDead: one has ended, or they take longer.
        """
        poller = zmq.Poller()
        for source in self.sources:
            poller.register(source, zmq.POLLIN)
        missing = set(self.ranks)
        while missing:
            if not poller.poll(int(timeout_s * 1000)):
                raise EngineDead(f"rank {min(missing)} has not answered for {timeout_s:g} s")
            self.check()
            missing -= {rank for rank, _ in self.receive()}

    def send(self, message: bytes) -> None:
        """Send a message to each rank."""
        for rank in self.ranks:
            self._socket.send_multipart([str(rank).encode(), message])

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, each with its rank."""
        messages = []
        while self._socket.poll(0):
            rank, message = self._socket.recv_multipart()
            messages.append((int(rank), message))
        return messages

    def check(self) -> None:
        """Raise EngineDead if a rank has ended."""
        if self._processes.problem is not None:
            raise EngineDead(self._processes.problem)

    def close(self) -> None:
        """End all ranks."""
        self._processes.close()
        self._socket.close(linger=0)
