"""A priority queue with keys that may increase after insertion."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[float, int]


class LazyHeap(Generic[T]):
    """A min-heap for items with keys that increase over time.

    A key may increase without notice: the heap compares the stored key with the present key when
    the item reaches the top. If a key decreases, or changes from ``None`` to a value, push the item
    again. Items with equal keys are returned in the order of insertion.

    Args:
        key: returns the present key of an item; ``None`` if the item is no longer in the queue.
    """

    def __init__(self, key: Callable[[T], Key | None]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, T]] = []
        self._tickets = count()
        self._limit = 64  # entries; most of them may belong to items that have left

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, item: T) -> None:
        """Insert an item with its present key; do nothing if the key is ``None``."""
        key = self._key(item)
        if key is not None:
            heappush(self._heap, (key, next(self._tickets), item))
        if len(self._heap) > self._limit:
            self._rebuild()

    def first(self) -> T | None:
        """Return the item with the lowest key, without removing it; None if no item is left."""
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
        """Keep one entry for each item; set the limit at which the next rebuild happens."""
        items = dict.fromkeys(item for _, _, item in self._heap)
        keys = ((self._key(item), item) for item in items)
        self._heap = [(key, next(self._tickets), item) for key, item in keys if key is not None]
        heapify(self._heap)
        self._limit = 2 * len(self._heap) + 64
