"""Sequences that wait, in the order of their admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from paged_backend.core.sequence import Sequence


class WaitingQueue:
    """Ordered by priority, then arrival: one that was preempted stands before later ones."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._by_id: dict[int, Sequence] = {}

    def add(self, seq: Sequence) -> None:
        """Put a sequence in its place."""
        insort(self._order, seq.admission_order)
        self._by_id[seq.seq_id] = seq

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out if it waits."""
        if self._by_id.pop(seq.seq_id, None) is not None:
            del self._order[bisect_left(self._order, seq.admission_order)]

    def first(self) -> Sequence:
        """The next to be admitted; there must be one."""
        _, seq_id = self._order[0]
        return self._by_id[seq_id]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())
