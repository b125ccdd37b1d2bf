"""The publishing thread: live batches, replays and snapshots."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque

import msgspec
import zmq

from paged_backend.core.cache_journal import CacheState
from paged_backend.process.kv_events.events import (
    AllBlocksCleared,
    KVEvent,
    KVEventBatch,
    events_of,
)
from paged_backend.process.kv_events.queue import Changes, Cleared, EventQueue, Item, Lost
from paged_backend.process.kv_events.sockets import SNAPSHOT, EventSockets

HEARTBEAT_S = 1.0  # between the batches of an idle publisher, if there are snapshots
MAX_WAITING = 32  # subscribers that wait for a snapshot
CHUNK_EVENTS = 16  # events in a chunk; the engine may run between the encoding of two chunks

_encode = msgspec.msgpack.Encoder().encode


class Sender:
    """Sends what is in a queue, and answers subscribers, until the queue ends.

    Args:
        sockets: the sockets, closed at the end.
        queue: batches and states from the engine's thread.
        buffer_steps: number of batches that are kept for replays.
        engine: number of the engine among those of its model.
    """

    def __init__(
        self, sockets: EventSockets, queue: EventQueue, buffer_steps: int, engine: int
    ) -> None:
        self._sockets = sockets
        self._queue = queue
        self._engine = engine
        self._next_seq = 0
        self._sent_s = time.monotonic()
        self._kept: deque[bytes] = deque(maxlen=buffer_steps)  # the batches before `_next_seq`
        self._waiting: list[list[bytes]] = []  # envelopes of requests for a snapshot

    def run(self) -> None:
        """Run the thread."""
        poller = zmq.Poller()
        poller.register(self._queue.wakeup_fd, zmq.POLLIN)
        for socket in (self._sockets.replay, self._sockets.snapshot):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        is_running = True
        while is_running:
            ready = dict(poller.poll(self._idle_ms()))
            if self._queue.wakeup_fd in ready:
                os.eventfd_read(self._queue.wakeup_fd)
            is_running = all([self._handle(item) for item in self._queue.take()])
            # One request each, so that a flood of requests does not delay live batches.
            if self._sockets.replay in ready:
                self._replay()
            if self._sockets.snapshot in ready:
                self._ask_for_state()
            if self._idle_ms() == 0:
                self._send(time.time(), [])
        self._sockets.close()
        os.close(self._queue.wakeup_fd)

    def _handle(self, item: Item) -> bool:
        """Handle an item of the queue; returns False for the last one."""
        match item:
            case Changes(time_s, changes, layout):
                self._send(time_s, events_of(changes, layout))
            case Cleared(time_s):
                self._send(time_s, [AllBlocksCleared()])
            case Lost(num_batches):
                self._next_seq += num_batches
                self._kept.clear()
            case CacheState():
                self._send_snapshots(item)
        return item is not None

    def _send(self, time_s: float, events: list[KVEvent]) -> None:
        payload = _encode(KVEventBatch(time_s, events, self._engine))
        self._sockets.send_live(self._next_seq, payload)
        self._kept.append(payload)
        self._next_seq += 1
        self._sent_s = time.monotonic()

    def _idle_ms(self) -> int | None:
        """Return the time until a heartbeat is due; None without heartbeats."""
        if self._sockets.snapshot is None:
            return None
        return max(0, int(1000 * (self._sent_s + HEARTBEAT_S - time.monotonic())))

    def _replay(self) -> None:
        """Answer a request for the batches from a sequence number on.

        A request of another form, and a number that has not been sent yet, get the end marker only.
        An old number gets the batches that are still kept.
        """
        assert self._sockets.replay is not None
        client, *frames = self._sockets.replay.recv_multipart()
        if len(frames) == 2 and len(frames[1]) == 8:
            first_kept = self._next_seq - len(self._kept)
            asked = int.from_bytes(frames[1], "big")
            first = min(max(asked, first_kept), self._next_seq)
            kept = itertools.islice(self._kept, first - first_kept, None)
            for seq, payload in enumerate(kept, first):
                self._sockets.send_replayed(client, seq, payload)
        self._sockets.end_replay(client)

    def _ask_for_state(self) -> None:
        """Take a request for a snapshot, and ask the engine's thread for its state."""
        assert self._sockets.snapshot is not None
        *envelope, content = self._sockets.snapshot.recv_multipart()
        is_request = content == SNAPSHOT and len(envelope) <= 2  # an identity, and REQ's delimiter
        if not is_request or len(self._waiting) >= MAX_WAITING:
            self._sockets.refuse_snapshot(envelope[:2])
            return
        self._waiting.append(envelope)
        self._queue.is_state_wanted = True

    def _send_snapshots(self, state: CacheState) -> None:
        events, now = events_of(state.changes_from_empty(), state.layout), time.time()
        chunks = [
            _encode(KVEventBatch(now, events[start : start + CHUNK_EVENTS], self._engine))
            for start in range(0, len(events), CHUNK_EVENTS)
        ]
        for envelope in self._waiting:
            self._sockets.send_snapshot(envelope, self._next_seq - 1, chunks)
        self._waiting.clear()
