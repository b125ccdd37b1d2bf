"""Blocks as ids: reference counts, content hashes and a least-recently-used free list."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

NULL_BLOCK = 0
"""The block that is never allocated, so that it can pad block tables."""


class BlockPool:
    """Allocates the ids of ``num_blocks`` blocks; each operation takes constant time.

    A block is *used* while its reference count is above zero, and *free* otherwise. A free block
    keeps its content and its hash until it is allocated again, so the free list is the cache. It
    is allocated from the front, where the blocks without a registered content are; the cached
    blocks follow, from the least to the most recently used.
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
        self.num_cached = 0  # free blocks with registered content

    @property
    def num_usable(self) -> int:
        """Number of blocks without the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of blocks that a sequence owns."""
        return self.num_usable - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """The number of sequences that own the block."""
        return self._ref_counts[block_id]

    def allocate(self) -> int:
        """Allocate the first block of the free list; its old content is forgotten.

        Raises:
            RuntimeError: no block is free; callers must check ``num_free`` first.
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
        """Remove one owner from each block, in order; the first freed is allocated first.

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

    def registered_hashes(self) -> set[bytes]:
        """The hashes of all blocks that can be found, used or free."""
        return set(self._block_by_hash)

    def cached_block_ids(self) -> list[int]:
        """Free blocks with registered content, in the order in which they will be allocated."""
        return [block_id for block_id in self._free if self._hashes[block_id] is not None]

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this content, used or free; None if there is none."""
        return self._block_by_hash.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Register the content of a used block, unless another block has the same content.

        Block tables only grow at their end, so a duplicate is not replaced by the registered block.
        """
        if block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block_id
            self._hashes[block_id] = block_hash

    def check_invariants(self, owners: Counter[int]) -> None:
        """Compare the pool with ``owners``, which counts block ids over all block tables.

        Raises:
            RuntimeError: a block leaked, is both free and used, or is registered wrongly.
        """
        for block_id in range(1, self.num_blocks):
            count = self._ref_counts[block_id]
            if count != owners[block_id]:
                raise RuntimeError(
                    f"block {block_id} has {owners[block_id]} owners but reference count {count}"
                )
            if (count == 0) != (block_id in self._free):
                raise RuntimeError(f"block {block_id} with {count} owners is in the wrong list")
        if owners[NULL_BLOCK] or NULL_BLOCK in self._free or self._ref_counts[NULL_BLOCK]:
            raise RuntimeError("the null block is in use")
        named = {h: b for b, h in enumerate(self._hashes) if h is not None}
        if named != self._block_by_hash:
            raise RuntimeError("registered hashes and blocks do not match")
        if self.num_cached != sum(block_id in self._free for block_id in named.values()):
            raise RuntimeError(f"num_cached is {self.num_cached}, which is wrong")
