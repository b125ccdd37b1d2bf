"""The sockets of the publisher and their frames."""

from __future__ import annotations

import uuid

import zmq

from paged_backend.values.errors import option_error
from paged_backend.values.options.kv_events import OPTION, KVEventsConfig, is_bound

MAX_REQUEST_BYTES = 4096  # libzmq disconnects a subscriber that sends a longer frame
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
UNAVAILABLE = (-2).to_bytes(8, "big", signed=True)
SNAPSHOT = b"snapshot"
_LINGER_MS = 500

Socket = zmq.Socket[bytes]


class EventSockets:
    """The sockets for live events, replays and snapshots. Used by one thread at a time.

    No call waits for a subscriber. What a subscriber does not read is dropped, beyond ``hwm`` live
    batches, two replays and two snapshots.

    Args:
        config: addresses and the topic.

    Raises:
        ConfigError: an address cannot be used.

    Attributes:
        pub: sends live batches.
        replay: receives requests for replays; None without an endpoint.
        snapshot: receives requests for snapshots; None without an endpoint.
        publisher_id: 16 random bytes.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self.publisher_id = uuid.uuid4().bytes
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self.pub = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm)
        self.replay = self.snapshot = None
        if config.replay_endpoint is not None:
            size = 2 * (config.buffer_steps + 1)
            self.replay = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, size)
        if config.snapshot_endpoint is not None:
            address = config.snapshot_endpoint
            self.snapshot = self._open(zmq.ROUTER, "snapshot_endpoint", address, 2)

    def send_live(self, seq: int, payload: bytes) -> None:
        """Send a batch to all subscribers."""
        self.pub.send_multipart([self._topic, self._sequence_frame(seq), payload], zmq.NOBLOCK)

    def send_replayed(self, client: bytes, seq: int, payload: bytes) -> None:
        """Send a batch to a client that has asked for a replay."""
        assert self.replay is not None
        frames = [client, b"", self._topic, self._sequence_frame(seq), payload]
        self.replay.send_multipart(frames, zmq.NOBLOCK)

    def end_replay(self, client: bytes) -> None:
        """Send the end marker of a replay."""
        assert self.replay is not None
        self.replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""], zmq.NOBLOCK)

    def send_snapshot(self, envelope: list[bytes], seq: int, chunks: list[bytes]) -> None:
        """Send a snapshot.

        Args:
            envelope: first frames of the request, up to its only frame of content.
            seq: number of the last batch that the snapshot includes; -1 for none.
            chunks: encoded batches.
        """
        assert self.snapshot is not None
        number = seq.to_bytes(8, "big", signed=True)
        self.snapshot.send_multipart([*envelope, number, self.publisher_id, *chunks], zmq.NOBLOCK)

    def refuse_snapshot(self, envelope: list[bytes]) -> None:
        """Tell a client that there is no snapshot for it now."""
        assert self.snapshot is not None
        self.snapshot.send_multipart([*envelope, UNAVAILABLE, self.publisher_id], zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, for at most half a second, and close the sockets."""
        self._context.destroy(linger=_LINGER_MS)

    def _sequence_frame(self, seq: int) -> bytes:
        """Return the sequence number, with the publisher's id where there are snapshots."""
        number = seq.to_bytes(8, "big")
        return number if self.snapshot is None else number + self.publisher_id

    def _open(self, kind: int, name: str, address: str, hwm: int) -> Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        # Where it is on, a host name may become an IPv6 address that its host does not listen to.
        socket.setsockopt(zmq.IPV6, int("::" in address))
        try:
            if kind == zmq.ROUTER or is_bound(address):
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise option_error(f"{OPTION}.{name}", f"cannot be used: {error}") from error
        return socket
