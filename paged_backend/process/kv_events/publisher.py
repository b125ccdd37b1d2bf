"""The engine's side of the publisher."""

from __future__ import annotations

import threading
import time
from time import monotonic

from paged_backend.core.cache_journal import CacheJournal
from paged_backend.process.kv_events.queue import Changes, Cleared, EventQueue
from paged_backend.process.kv_events.sender import Sender
from paged_backend.process.kv_events.sockets import EventSockets
from paged_backend.values.options.kv_events import KVEventsConfig

_CLOSE_S = 1.0  # how long the last batches may take
_PAUSE = 19  # length of the pause after a copy of the state, as a multiple of the copy's time


class KVEventPublisher:
    """Publishes the events of a journal. The engine's thread calls all methods.

    Args:
        config: addresses, topic and numbers of kept batches.
        engine: number of the engine among those of its model, for the batches.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, engine: int = 0) -> None:
        self._queue = EventQueue(config.max_queue_size)
        sender = Sender(EventSockets(config), self._queue, config.buffer_steps, engine)
        self._thread = threading.Thread(target=sender.run, name="kv-events", daemon=True)
        self._thread.start()
        self._next_state_s = 0.0  # seconds of the monotonic clock
        self._queue.add(Cleared(time.time()))  # an earlier engine's blocks are gone

    def publish(self, journal: CacheJournal) -> None:
        """Hand over the changes of a journal, and its state if a subscriber has asked for it.

        Copies of the state take at most 5% of the engine's time, however often subscribers ask.
        """
        changes = journal.take()
        if changes:
            self._queue.add_changes(Changes(time.time(), changes, journal.layout))
        started_s = monotonic()
        if self._queue.is_state_wanted and started_s >= self._next_state_s:
            self._queue.is_state_wanted = False
            self._queue.add(journal.state())
            ended_s = monotonic()
            self._next_state_s = ended_s + _PAUSE * (ended_s - started_s)

    def close(self) -> None:
        """Publish that the cache is gone, and end the thread."""
        self._queue.add(Cleared(time.time()))
        self._queue.add(None)
        self._thread.join(_CLOSE_S)
