"""What the engine's thread hands over to the publishing thread."""

from __future__ import annotations

import os
from collections import deque
from typing import NamedTuple

from paged_backend.core.cache_journal import CacheChange, CacheState
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.log import LOG


class Changes(NamedTuple):
    """The changes of a step."""

    time_s: float  # seconds since 1970
    changes: list[CacheChange]
    layout: KVCacheLayout


class Cleared(NamedTuple):
    """The cache is empty, because its engine starts or ends."""

    time_s: float  # seconds since 1970


class Lost(NamedTuple):
    """Batches were dropped here, because too many were waiting."""

    num_batches: int


Item = Changes | Cleared | Lost | CacheState | None
"""None is the last item."""


class EventQueue:
    """Items in their order. One thread adds them, and another thread takes them.

    Args:
        max_items: number of waiting items from which on changes are dropped.

    Attributes:
        wakeup_fd: a file descriptor that can be read when there is something to take.
        is_state_wanted: whether the adding thread should add a state.
    """

    def __init__(self, max_items: int) -> None:
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.is_state_wanted = False
        self._max_items = max_items
        self._num_lost = 0
        self._items: deque[Item] = deque()

    def add_changes(self, changes: Changes) -> None:
        """Add changes, or drop them if too many items wait."""
        if len(self._items) >= self._max_items:
            if not self._num_lost:
                LOG.warning("KV events are lost: %d batches wait to be sent", len(self._items))
            self._num_lost += 1
            return
        if self._num_lost:
            self._items.append(Lost(self._num_lost))
            self._num_lost = 0
        self.add(changes)

    def add(self, item: Item) -> None:
        """Add an item, however many wait."""
        self._items.append(item)
        os.eventfd_write(self.wakeup_fd, 1)

    def take(self) -> list[Item]:
        """Remove and return the items that have been added."""
        return [self._items.popleft() for _ in range(len(self._items))]
