"""The owners of the KV blocks, and the character that represents each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Final

import numpy as np
from numpy.typing import NDArray
from paged_client import EngineView, SequenceView

MANY: Final = 10  # from this number of owners on, `MANY_MARK` replaces the number
MANY_MARK = "+"
# Letters distinguish sequences without color. Pairs of 52 letters and 9 colors repeat after 468.
MARKS = ascii_letters
COLORS = (114, 176, 75, 209, 80, 147, 150, 216, 180)  # light ones of a terminal's 256

# How busy a block is; the rank of a shared block is its number of owners plus 1.
_NOBODY, _FREE, _CACHED, _PRIVATE = range(-1, 3)


@dataclass(frozen=True, slots=True)
class Cell:
    """One character of the map."""

    glyph: str
    style: str


FREE, CACHED = Cell("·", "bright_black"), Cell("░", "cyan")


def private(mark: int) -> Cell:
    """The cell of a block that one sequence owns."""
    return Cell(MARKS[mark % len(MARKS)], f"black on color({COLORS[mark % len(COLORS)]})")


def shared(num_owners: int) -> Cell:
    """The cell of a block that several sequences own."""
    return Cell(str(num_owners) if num_owners < MANY else MANY_MARK, "bold black on color(226)")


class Marks:
    """Assigns each sequence the lowest free number, which it keeps until it ends."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, int], int] = {}

    def of(self, sequences: Sequence[SequenceView]) -> tuple[int, ...]:
        """The numbers of these sequences, in order; the numbers of all others become free."""
        keys = [(sequence.request_id, sequence.index) for sequence in sequences]
        self._marks = {key: self._marks[key] for key in keys if key in self._marks}
        taken = set(self._marks.values())
        free = (mark for mark in range(len(keys)) if mark not in taken)
        for key in keys:
            if key not in self._marks:
                self._marks[key] = next(free)
        return tuple(self._marks[key] for key in keys)


class Pool:
    """The blocks of an engine; ``marks`` are the numbers of its sequences, in order."""

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
        self._rank[0] = _NOBODY  # the null block is a placeholder for no block
        self.num_blocks = view.num_blocks - 1
        self.num_free = int(np.count_nonzero(self._rank == _FREE))
        self.num_cached = int(np.count_nonzero(self._rank == _CACHED))
        self.num_private = int(np.count_nonzero(self._rank == _PRIVATE))
        self.num_shared = int(np.count_nonzero(self._rank > _PRIVATE))
        # Number of additional blocks that the sequences would need without sharing.
        self.num_saved = int(self._num_owners.sum()) - self.num_private - self.num_shared

    def cell(self, block_id: int) -> Cell:
        """The cell that represents a block."""
        num_owners = int(self._num_owners[block_id])
        if num_owners > 1:
            return shared(num_owners)
        if num_owners == 1:
            return private(int(self._mark[block_id]))
        return CACHED if self._rank[block_id] == _CACHED else FREE

    def map(self, blocks_per_cell: int) -> list[Cell]:
        """The cells of all blocks in order; a cell for several blocks shows the busiest one."""
        padding = -self.num_blocks % blocks_per_cell
        ranks = np.pad(self._rank[1:], (0, padding), constant_values=_NOBODY)
        busiest = ranks.reshape(-1, blocks_per_cell).argmax(axis=1)
        first = np.arange(len(busiest)) * blocks_per_cell + 1
        return [self.cell(block_id) for block_id in (first + busiest).tolist()]

    def num_shared_of(self, sequence: SequenceView) -> int:
        """The number of a sequence's blocks that other sequences own as well."""
        return int(np.count_nonzero(self._num_owners[_real(sequence.block_ids)] > 1))


def _real(block_ids: Sequence[int]) -> NDArray[np.intp]:
    """The block ids as an array, without the null block."""
    ids = np.asarray(block_ids, np.intp)
    return ids[ids > 0]
