"""A node other than node 0: it starts its ranks when node 0 says what to load.

It passes messages between node 0 and its ranks. When node 0 is gone, or a rank ends, it ends its
ranks and waits for the next engine of node 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from paged_backend.checkpoint.fingerprint import fingerprint
from paged_backend.checkpoint.hub import resolve_checkpoint
from paged_backend.engine.local_ranks import FOLDERS, LocalRanks
from paged_backend.engine.node_sockets import Context, connect, own_address
from paged_backend.engine.remote_ranks import PROBLEM
from paged_backend.executor.messages import (
    JoinGroup,
    JoinRefused,
    LoadModel,
    ModelLoaded,
    decode_first,
    encode,
    own_version,
)
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, EngineDead
from paged_backend.values.log import LOG
from paged_backend.values.nodes import Nodes

_STRANGERS = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | _STRANGERS


def run_node(nodes: Nodes, key: bytes, joined_file: Path | None = None) -> NoReturn:
    """Compute with each engine of node 0, one after the other, until the process ends.

    Args:
        nodes: all nodes; this is not node 0.
        key: the nodes' secret.
        joined_file: an empty file that is made when this node is connected for the first time.

    Raises:
        ConfigError: node 0 refuses this node, for example because it has another version.
    """
    if joined_file is not None:  # an earlier process of this container may have left it
        joined_file.unlink(missing_ok=True)
    while True:
        LOG.info("node %d waits for %s, port %d", nodes.rank, nodes.address, nodes.port)
        context: Context = zmq.Context()
        try:
            _Connection(context, nodes, key, joined_file).serve()
        except EngineDead as error:
            LOG.warning("node %d ends its ranks: %s", nodes.rank, error.problem)
        finally:
            context.destroy(linger=0)


class _Connection:
    """The connection to one engine of node 0.

    Args:
        context: makes the sockets.
        nodes: all nodes.
        key: the nodes' secret.
        joined_file: see `run_node`.
    """

    def __init__(
        self, context: Context, nodes: Nodes, key: bytes, joined_file: Path | None
    ) -> None:
        self._context = context
        self._nodes = nodes
        self._joined_file = joined_file
        self._is_connected = False
        self._socket = connect(context, nodes, key)
        self._events = self._socket.get_monitor_socket(_EVENTS)
        self._poller = zmq.Poller()
        for source in (self._socket, self._events):
            self._poller.register(source, zmq.POLLIN)

    def serve(self) -> NoReturn:
        """Join, start the ranks, and pass messages.

        Raises:
            ConfigError: node 0 refuses this node.
            EngineDead: node 0 is gone.
        """
        self._socket.send(encode(JoinGroup(own_version(), self._nodes.rank, self._nodes.number)))
        message = self._first_message()
        try:
            message = self._find_model(message)
        except ConfigError as error:
            self._report(message, f"node {self._nodes.rank}: {error}")
        with self._started(message) as ranks:
            while True:
                self._poller.poll()
                self._look()
                self._pass_messages(ranks)

    def _first_message(self) -> LoadModel:
        while True:
            self._poller.poll()
            if self._socket.poll(0):
                message: LoadModel | JoinRefused = decode_first(self._socket.recv())
                if isinstance(message, LoadModel):
                    return message
                raise ConfigError(f"node 0 refuses this node: {message.problem}")
            self._look()

    def _look(self) -> None:
        """Raise EngineDead if node 0 is gone."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            if event & _STRANGERS:
                LOG.warning(
                    "the process at %s, port %d, ended the handshake: it has another secret, or "
                    "was about to end",
                    self._nodes.address,
                    self._nodes.port,
                )
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                LOG.info("node %d is connected with node 0", self._nodes.rank)
                self._is_connected = True
                if self._joined_file is not None:
                    self._joined_file.touch()
            elif self._is_connected:
                raise EngineDead("node 0 is gone")

    def _find_model(self, message: LoadModel) -> LoadModel:
        """Return the message for this node's ranks, with the places of files on this host."""
        folder, tokenizer = Path(message.folder), message.tokenizer
        is_here = folder.exists() and (tokenizer is None or Path(tokenizer).exists())
        if not is_here:
            checkpoint = resolve_checkpoint(EngineConfig.from_mapping(message.options))
            folder = checkpoint.model
            tokenizer = None if tokenizer is None else str(checkpoint.tokenizer)
        if fingerprint(folder) != message.fingerprint:
            raise ConfigError(
                f"{folder} is another model than that of node 0: config.json, or the names or "
                "sizes of files of weights differ"
            )
        return msgspec.structs.replace(
            message, folder=str(folder), tokenizer=tokenizer, host=own_address(self._nodes)
        )

    def _report(self, message: LoadModel, problem: str) -> NoReturn:
        """Say that this node cannot load the model, and wait until node 0 ends the engine."""
        LOG.error("%s", problem)
        first = self._nodes.rank * message.ranks_per_node
        self._socket.send_multipart([b"%d" % first, encode(ModelLoaded(problem))])
        while True:
            self._poller.poll()
            self._look()
            if self._socket.poll(0):
                self._socket.recv()

    @contextmanager
    def _started(self, message: LoadModel) -> Iterator[LocalRanks]:
        """Start this node's ranks; they end with the context."""
        number = message.ranks_per_node
        numbers = range(self._nodes.rank * number, (self._nodes.rank + 1) * number)
        LOG.info("node %d loads %s with %d ranks", self._nodes.rank, message.folder, number)
        with tempfile.TemporaryDirectory(prefix="pb-ranks-", dir=FOLDERS) as name:
            with closing(LocalRanks(self._context, Path(name), numbers)) as ranks:
                ranks.wait_until_started(message.options["distributed_timeout_seconds"])
                ranks.send(encode(message))
                for source in ranks.sources:
                    self._poller.register(source, zmq.POLLIN)
                yield ranks

    def _pass_messages(self, ranks: LocalRanks) -> None:
        while self._socket.poll(0):
            message = self._socket.recv()
            if message:  # node 0 sends empty ones to see whether this node is there
                ranks.send(message)
        for rank, message in ranks.receive():
            self._socket.send_multipart([b"%d" % rank, message])
        try:
            ranks.check()
        except EngineDead as error:
            self._socket.send_multipart([PROBLEM, error.problem.encode()])
            self._socket.close(linger=1000)
            raise
