"""A count of the tokens in each block for which the draft model has keys and values, too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.values.kv_cache_groups import KVCacheLayout


class DraftedSlots:
    """Counts, for each block, its first tokens with keys and values of the draft model.

    The draft model has its keys and values in blocks with the same ids. It computes fewer tokens
    than the main model. Whatever the main model writes has to be computed anew by the draft model;
    what both have computed can be found as a prefix hit.

    Args:
        layout: the groups of the block tables. The draft model uses the tables of one group.
        num_blocks: blocks of the pool, with the null block.
        group: the number of this group, which has no window.
    """

    def __init__(self, layout: KVCacheLayout, num_blocks: int, group: int) -> None:
        self._block_size = layout.block_size
        self._num_groups = layout.num_groups
        self._group = group
        self._counts = np.zeros(num_blocks, np.int32)  # [num_blocks]

    def table(self, block_ids: list[int]) -> list[int]:
        """Return the block table that the draft model uses, from those of all groups."""
        return block_ids if self._num_groups == 1 else block_ids[self._group :: self._num_groups]

    def number(self, table: list[int], num_tokens: int) -> int:
        """Return how many of the first tokens of a sequence have keys and values."""
        size = self._block_size
        blocks = np.array(table[: -(-num_tokens // size)], np.int64)
        short = np.flatnonzero(self._counts[blocks] < size)
        if len(short) == 0:
            return num_tokens
        first = int(short[0])
        return min(num_tokens, first * size + int(self._counts[blocks[first]]))

    def add(self, table: list[int], start: int, end: int) -> None:
        """Record that the draft model has computed the tokens at `start` to `end` - 1.

        It has computed all tokens before them, too.
        """
        size = self._block_size
        for place in range(start // size, -(-end // size)):
            count = min(end - place * size, size)
            self._counts[table[place]] = max(self._counts[table[place]], count)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Record that the blocks of the draft model are copied, too."""
        for source, target in pairs:
            self._counts[target] = self._counts[source]

    def overwrite(self, batch: ScheduledBatch) -> None:
        """Record that the main model computes the tokens of a step, its drafts included."""
        size = self._block_size
        blocks: list[int] = []
        places: list[int] = []  # in each block, of the first token that is written
        for seq in batch.continued.sequences:
            number, place = divmod(len(seq.token_ids) - 1, size)
            blocks.append(seq.block_ids[number * self._num_groups + self._group])
            places.append(place)
        for item in batch.scheduled:
            last = (item.start + len(item.token_ids) - 1) // size
            place = item.start % size
            for number in range(item.start // size, last + 1):
                blocks.append(item.block_ids[number * self._num_groups + self._group])
                places.append(place)
                place = 0
        self._counts[blocks] = np.minimum(self._counts[blocks], places)
