"""Who has which block, and how that looks in one character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Final

import numpy as np
from numpy.typing import NDArray
from paged_client import EngineView, SequenceView

MANY: Final = 10  # owners from which on they are not counted
MANY_MARK = "+"
# Letters tell sequences apart without color. 52 letters and 9 colors meet again after 468.
MARKS = ascii_letters
COLORS = (114, 176, 75, 209, 80, 147, 150, 216, 180)  # light ones, of the 256 that terminals know

# How busy a block is; a shared one is by one more than it has owners.
_NOBODY, _FREE, _CACHED, _PRIVATE = range(-1, 3)


@dataclass(frozen=True, slots=True)
class Cell:
    """One character of the map."""

    glyph: str
    style: str


FREE, CACHED = Cell("·", "bright_black"), Cell("░", "cyan")


def private(mark: int) -> Cell:
    """A block of one sequence."""
    return Cell(MARKS[mark % len(MARKS)], f"black on color({COLORS[mark % len(COLORS)]})")


def shared(num_owners: int) -> Cell:
    """A block of several."""
    return Cell(str(num_owners) if num_owners < MANY else MANY_MARK, "bold black on color(226)")


class Marks:
    """Gives each sequence a number that it keeps as long as it lives, the lowest that is free."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, int], int] = {}

    def of(self, sequences: Sequence[SequenceView]) -> tuple[int, ...]:
        """The numbers of those that live now; all others are free again."""
        keys = [(sequence.request_id, sequence.index) for sequence in sequences]
        self._marks = {key: self._marks[key] for key in keys if key in self._marks}
        taken = set(self._marks.values())
        free = (mark for mark in range(len(keys)) if mark not in taken)
        for key in keys:
            if key not in self._marks:
                self._marks[key] = next(free)
        return tuple(self._marks[key] for key in keys)


class Pool:
    """The blocks of an engine; ``marks`` are those of its sequences."""

    def __init__(self, view: EngineView, marks: Sequence[int]) -> None:
        self._num_owners: NDArray[np.int32] = np.zeros(view.num_blocks, np.int32)
        self._mark: NDArray[np.int32] = np.full(view.num_blocks, _NOBODY, np.int32)
        for sequence, mark in zip(view.sequences, marks, strict=True):
            block_ids = _real(sequence.block_ids)
            self._num_owners[block_ids] += 1
            self._mark[block_ids] = mark
        self._rank = self._num_owners + (self._num_owners > 0)
        cached = _real(view.cached_block_ids)
        self._rank[cached] = np.maximum(self._rank[cached], _CACHED)
        self._rank[0] = _NOBODY  # the null block stands for no block
        self.num_blocks = view.num_blocks - 1
        self.num_free = int(np.count_nonzero(self._rank == _FREE))
        self.num_cached = int(np.count_nonzero(self._rank == _CACHED))
        self.num_private = int(np.count_nonzero(self._rank == _PRIVATE))
        self.num_shared = int(np.count_nonzero(self._rank > _PRIVATE))
        # What sequences would need more if none could share.
        self.num_saved = int(self._num_owners.sum()) - self.num_private - self.num_shared

    def cell(self, block_id: int) -> Cell:
        """How a block looks."""
        num_owners = int(self._num_owners[block_id])
        if num_owners > 1:
            return shared(num_owners)
        if num_owners == 1:
            return private(int(self._mark[block_id]))
        return CACHED if self._rank[block_id] == _CACHED else FREE

    def map(self, blocks_per_cell: int) -> list[Cell]:
        """All blocks in order; of several in a cell the busiest shows."""
        padding = -self.num_blocks % blocks_per_cell
        ranks = np.pad(self._rank[1:], (0, padding), constant_values=_NOBODY)
        busiest = ranks.reshape(-1, blocks_per_cell).argmax(axis=1)
        first = np.arange(len(busiest)) * blocks_per_cell + 1
        return [self.cell(block_id) for block_id in (first + busiest).tolist()]

    def num_shared_of(self, sequence: SequenceView) -> int:
        """How many of a sequence's blocks are others' too."""
        return int(np.count_nonzero(self._num_owners[_real(sequence.block_ids)] > 1))


def _real(block_ids: Sequence[int]) -> NDArray[np.intp]:
    """Ids as an array, the null block left out."""
    ids = np.asarray(block_ids, np.intp)
    return ids[ids > 0]
