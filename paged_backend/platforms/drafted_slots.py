"""A count of the tokens in each block for which the draft model has keys and values, too."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.values.kv_cache_groups import KVCacheLayout


class DraftedSlots:
    """Counts, for each block, its first tokens with keys and values of the draft model.

    The draft model has its keys and values in blocks with the same ids. It computes fewer tokens
    than the main model. Whatever the main model writes has to be computed anew by the draft model;
    what both have computed can be found as a prefix hit.

    Args:
        layout: the groups of the block tables. The draft model uses the tables of one group.
        group: the number of this group, which has no window.
    """

    def __init__(self, layout: KVCacheLayout, group: int) -> None:
        self._block_size = layout.block_size
        self._num_groups = layout.num_groups
        self._group = group
        self._counts: dict[int, int] = {}  # by block, without zeros

    def table(self, block_ids: list[int]) -> list[int]:
        """Return the block table that the draft model uses, from those of all groups."""
        return block_ids if self._num_groups == 1 else block_ids[self._group :: self._num_groups]

    def number(self, table: list[int], num_tokens: int, num_known: int) -> int:
        """Return how many of the first tokens of a sequence have keys and values.

        Args:
            table: the block table.
            num_tokens: number of tokens that could have some.
            num_known: number of first tokens that are known to have some.
        """
        size, counts = self._block_size, self._counts
        for place in range(num_known // size, -(-num_tokens // size)):
            count = counts.get(table[place], 0)
            if count < size:
                return min(num_tokens, place * size + count)
        return num_tokens

    def add(self, table: list[int], start: int, end: int) -> None:
        """Record that the draft model has computed the tokens at `start` to `end` - 1.

        It has computed all tokens before them, too.
        """
        size = self._block_size
        for place in range(start // size, -(-end // size)):
            count = min(end - place * size, size)
            self._counts[table[place]] = max(self._counts.get(table[place], 0), count)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Record that the blocks of the draft model are copied, too."""
        for source, target in pairs:
            self._lower(target, 0)
            if source in self._counts:
                self._counts[target] = self._counts[source]

    def overwrite(self, batch: ScheduledBatch) -> None:
        """Record that the main model computes the tokens of a step, its drafts included."""
        size = self._block_size
        for seq in batch.continued.sequences:
            number, place = divmod(len(seq.token_ids) - 1, size)
            self._lower(seq.block_ids[number * self._num_groups + self._group], place)
        for item in batch.scheduled:
            last = (item.start + len(item.token_ids) - 1) // size
            start = item.start - item.max_move  # or later, if drafts in flight are right
            place = start % size
            for number in range(start // size, last + 1):
                self._lower(item.block_ids[number * self._num_groups + self._group], place)
                place = 0

    def _lower(self, block_id: int, place: int) -> None:
        """Record that the draft model has computed no tokens of a block from a place on."""
        count = self._counts.get(block_id)
        if count is not None and count > place:
            if place:
                self._counts[block_id] = place
            else:
                del self._counts[block_id]
