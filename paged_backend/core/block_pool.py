"""Blocks as ids: reference counts, content hashes and a least-recently-used free list."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0
"""Never allocated, so it is safe to read as padding."""


class BlockPool:
    """Hands out the ids of ``num_blocks`` blocks; each operation takes constant time.

    A block is *used* while its reference count is above zero and *free* otherwise. A free block
    keeps its content and its hash until somebody needs the room, so the free list is the cache:
    its front is taken first, and it holds blocks without a findable content, then the cached ones
    from the least to the most recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks=}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        # An ordered dict is a linked list with an index: constant-time removal from its middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_cached = 0  # free blocks whose content can still be found

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence owns."""
        return self.num_usable - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many sequences own the block."""
        return self._ref_counts[block_id]

    def allocate(self) -> int:
        """Take the least useful free block; its old content is forgotten.

        Raises:
            RuntimeError: no block is free; callers look at ``num_free`` first.
        """
        if not self._free:
            raise RuntimeError("no free block: the caller did not check num_free")
        block_id, _ = self._free.popitem(last=False)
        old_hash = self._hashes[block_id]
        if old_hash is not None:
            del self._block_by_hash[old_hash]
            self._hashes[block_id] = None
            self.num_cached -= 1
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add an owner to a used block, or take a cached block back into use."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
            self.num_cached -= self._hashes[block_id] is not None
        self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one owner from each block, in order; the first freed is reused first.

        Raises:
            RuntimeError: a block has no owner.
        """
        for block_id in block_ids:
            if self._ref_counts[block_id] <= 0:
                raise RuntimeError(f"block {block_id} is released but has no owner")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
                else:
                    self.num_cached += 1

    def cached_block_ids(self) -> list[int]:
        """Free blocks with findable content, the next to be reused first."""
        return [block_id for block_id in self._free if self._hashes[block_id] is not None]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, used or free."""
        return self._block_by_hash.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a used block's content findable, unless another block has the same content.

        Block tables only ever grow at their end, so an equal block is not swapped in afterwards.
        """
        if block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def check_invariants(self, owners: Counter[int]) -> None:
        """Compare the books with the truth; ``owners`` counts block ids over all block tables.

        Raises:
            RuntimeError: a block leaked, is both free and used, or is wrongly findable.
        """
        for block_id in range(1, self.num_blocks):
            count = self._ref_counts[block_id]
            if count != owners[block_id]:
                raise RuntimeError(
                    f"block {block_id} has {owners[block_id]} owners but reference count {count}"
                )
            if (count == 0) != (block_id in self._free):
                raise RuntimeError(f"block {block_id} with {count} owners is wrongly listed")
        if owners[NULL_BLOCK] or NULL_BLOCK in self._free or self._ref_counts[NULL_BLOCK]:
            raise RuntimeError("the null block is in use")
        named = {h: b for b, h in enumerate(self._hashes) if h is not None}
        if named != self._block_by_hash:
            raise RuntimeError("hashes and blocks do not name each other")
        if self.num_cached != sum(block_id in self._free for block_id in named.values()):
            raise RuntimeError(f"{self.num_cached} blocks are said to be cached")
