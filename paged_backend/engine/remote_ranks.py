"""The connections of node 0 to ranks on other hosts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import zmq

from paged_backend.engine.node_sockets import Context, listen
from paged_backend.executor.messages import JoinRefused, decode_join, encode, own_version
from paged_backend.values.errors import ConfigError, EngineDead
from paged_backend.values.log import LOG
from paged_backend.values.nodes import Nodes

PROBLEM = b""  # in place of a rank's number: the node itself says why it ends


class RemoteRanks:
    """Waits for the other nodes, and passes messages to their ranks and from them.

    Args:
        context: makes the socket.
        nodes: all nodes.
        address: address of this host, as a number.
        key: the nodes' secret.
        ranks_per_node: number of ranks of each node.

    Attributes:
        ranks: the numbers of the ranks.
        sources: the socket.

    Raises:
        ConfigError: this host cannot listen at the address.
    """

    def __init__(
        self, context: Context, nodes: Nodes, address: str, key: bytes, ranks_per_node: int
    ) -> None:
        self._nodes = nodes
        self._ranks_per_node = ranks_per_node
        self.ranks: Sequence[int] = range(ranks_per_node, nodes.number * ranks_per_node)
        self._socket = listen(context, nodes, address, key)
        self._names: dict[int, bytes] = {}  # ZeroMQ's names of the nodes, by number
        self._problem: str | None = None
        self.sources: tuple[Any, ...] = (self._socket,)

    def wait_until_started(self, timeout_s: float) -> None:
        """Wait until all nodes have joined.

        Raises:
            ConfigError: they take longer; the error names the ranks that are missing.
        """
        deadline = time.monotonic() + timeout_s
        while len(self._names) < self._nodes.number - 1:
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                self._refuse_late(timeout_s)
            name, *frames = self._socket.recv_multipart()
            problem = self._admit(name, frames[0])
            if problem is not None:
                LOG.warning("a node is refused: %s", problem)
                self._send_to(name, encode(JoinRefused(problem)))

    def send(self, message: bytes) -> None:
        """Send a message to each node, which passes it to its ranks.

        Raises:
            EngineDead: a node is gone.
        """
        for node, name in self._names.items():
            if not self._send_to(name, message):
                raise EngineDead(self._problem or f"{self._describe(node)} is gone")

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, each with its rank."""
        messages = []
        while self._socket.poll(0):
            name, *frames = self._socket.recv_multipart()
            if name not in self._names.values():  # it came late, and waits for the next engine
                continue
            rank, message = frames
            if rank == PROBLEM:
                self._problem = message.decode()
            else:
                messages.append((int(rank), message))
        return messages

    def check(self) -> None:
        """Raise EngineDead if a node is gone, or one of its ranks has ended."""
        if self._problem is not None:
            raise EngineDead(self._problem)
        self.send(b"")  # which the nodes drop

    def close(self) -> None:
        """Disconnect from all nodes, which end their ranks."""
        self._socket.close(linger=0)

    def _admit(self, name: bytes, message: bytes) -> str | None:
        """Remember a node, or return why it cannot take part."""
        own = own_version()
        try:
            join = decode_join(message)
        except msgspec.DecodeError:
            return f"node 0 runs paged-backend {own}, and the node another version"
        if join.version != own:
            return (
                f"node 0 runs paged-backend {own}, and node {join.node} runs paged-backend "
                f"{join.version}: all nodes need the same version"
            )
        if join.num_nodes != self._nodes.number:
            number = self._nodes.number
            return f"nnodes is {number} at node 0 and {join.num_nodes} at node {join.node}"
        if not 0 < join.node < self._nodes.number:
            return f"there is no place for node {join.node}: nnodes is {self._nodes.number}"
        other = self._names.get(join.node)
        if other is not None and self._send_to(other, b""):
            return f"node_rank {join.node} is that of another node, which is connected"
        self._names[join.node] = name
        LOG.info("%s has joined", self._describe(join.node))
        return None

    def _send_to(self, name: bytes, message: bytes) -> bool:
        """Send a message to a node; returns False if the node is gone."""
        try:
            self._socket.send_multipart([name, message])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _refuse_late(self, timeout_s: float) -> NoReturn:
        missing = [n for n in range(1, self._nodes.number) if n not in self._names]
        names = " and ".join(self._describe(node) for node in missing)
        raise ConfigError(
            f"{names} did not join within {timeout_s:g} s (distributed_timeout_seconds): run "
            f"paged-backend worker there with --master-addr {self._nodes.address} "
            f"--master-port {self._nodes.port} and the same secret"
        )

    def _describe(self, node: int) -> str:
        first, last = node * self._ranks_per_node, (node + 1) * self._ranks_per_node - 1
        return f"node {node} (rank{f's {first} to' if last > first else ''} {last})"
