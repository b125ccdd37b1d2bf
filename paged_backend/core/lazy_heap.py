"""A heap whose items change their places by themselves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
Key = tuple[float, int]


class LazyHeap(Generic[T]):
    """Items by keys that only rise, which is noticed when an item comes to the top.

    Args:
        key: an item's key now; ``None`` for one that has left. A key that falls, or an item that
            comes back, has to be filed again. Equal keys stand in the order of filing.
    """

    def __init__(self, key: Callable[[T], Key | None]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, T]] = []
        self._tickets = count()
        self._limit = 64  # entries; most may be of items that have left

    def __len__(self) -> int:
        return len(self._heap)

    def file(self, item: T) -> None:
        """Put an item in its place."""
        key = self._key(item)
        if key is not None:
            heappush(self._heap, (key, next(self._tickets), item))
        if len(self._heap) > self._limit:
            self._rebuild()

    def first(self) -> T | None:
        """The item with the least key, if there is any."""
        while self._heap:
            filed, _, item = self._heap[0]
            key = self._key(item)
            if key == filed:
                return item
            if key is None:
                heappop(self._heap)
            else:
                heapreplace(self._heap, (key, next(self._tickets), item))
        return None

    def _rebuild(self) -> None:
        """Leave one entry for each item; the next time is when there are twice as many."""
        items = dict.fromkeys(item for _, _, item in self._heap)
        keys = ((self._key(item), item) for item in items)
        self._heap = [(key, next(self._tickets), item) for key, item in keys if key is not None]
        heapify(self._heap)
        self._limit = 2 * len(self._heap) + 64
