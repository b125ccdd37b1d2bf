"""A priority queue with keys that may grow after insertion."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[float, int]


class LazyHeap(Generic[T]):
    """Items by keys that only grow; a grown key is noticed when its item reaches the top.

    Args:
        key: returns the present key of an item; ``None`` for an item that has left. An item whose
            key falls, or that comes back, must be pushed again. Equal keys keep the order of
            insertion.
    """

    def __init__(self, key: Callable[[T], Key | None]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, T]] = []
        self._tickets = count()
        self._limit = 64  # entries; most of them may belong to items that have left

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, item: T) -> None:
        """Insert an item at its present key."""
        key = self._key(item)
        if key is not None:
            heappush(self._heap, (key, next(self._tickets), item))
        if len(self._heap) > self._limit:
            self._rebuild()

    def first(self) -> T | None:
        """Return the item with the lowest key; None if the heap is empty."""
        while self._heap:
            stored, _, item = self._heap[0]
            key = self._key(item)
            if key == stored:
                return item
            if key is None:
                heappop(self._heap)
            else:
                heapreplace(self._heap, (key, next(self._tickets), item))
        return None

    def _rebuild(self) -> None:
        """Keep one entry for each item; rebuild again when there are twice as many."""
        items = dict.fromkeys(item for _, _, item in self._heap)
        keys = ((self._key(item), item) for item in items)
        self._heap = [(key, next(self._tickets), item) for key, item in keys if key is not None]
        heapify(self._heap)
        self._limit = 2 * len(self._heap) + 64
