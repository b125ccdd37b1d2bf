"""Allocates block ids: reference counts, content hashes and an LRU free list."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

NULL_BLOCK = 0
"""The block that is never allocated, so that it can pad block tables."""


class BlockPool:
    """Allocates the ids of ``num_blocks`` blocks, in constant time for each block.

    Block 0 is the null block, which is never allocated. Any other block is *used* while its
    reference count is above zero, and *free* otherwise. A block is *registered* if it can be found
    by the hash of its content.

    A free block keeps its content and its hash until it is allocated again. The registered blocks
    in the free list are therefore the prefix cache (*cached* blocks). Blocks are allocated from the
    front of the free list. Blocks without a hash come first. The cached blocks follow, from the
    least recently used to the most recently used.

    Args:
        num_blocks: number of blocks, the null block included.
        on_eviction: called with each hash that is removed, because its block is allocated again.
    """

    def __init__(self, num_blocks: int, on_eviction: Callable[[bytes], None] | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs the null block, got {num_blocks=}")
        self.num_blocks = num_blocks
        self._on_eviction = on_eviction
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        # An ordered dict is a linked list with an index: constant-time removal from its middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_cached = 0  # free blocks with registered content

    @property
    def num_usable(self) -> int:
        """Number of blocks in the pool, without the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of blocks that at least one sequence owns."""
        return self.num_usable - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """Return the number of sequences that own the block."""
        return self._ref_counts[block_id]

    def allocate(self) -> int:
        """Allocate the first block of the free list, and remove its old hash.

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
            if self._on_eviction is not None:
                self._on_eviction(old_hash)
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add an owner to a block; a free block leaves the free list and keeps its content."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
            self.num_cached -= self._hashes[block_id] is not None
        self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one owner from each block, and free the blocks without another owner.

        A registered block goes to the end of the free list, in the order of ``block_ids``. A block
        without a hash goes to the front.

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
        """Return the cached blocks in the order in which they will be allocated."""
        return [block_id for block_id in self._free if self._hashes[block_id] is not None]

    def find(self, block_hash: bytes) -> int | None:
        """Return the block registered with this hash, used or free; None if there is none."""
        return self._block_by_hash.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Register a used block, so that :meth:`find` returns it for its hash; returns True.

        If another block is registered with the same hash, the new block stays unregistered, and
        the result is False. Both blocks are kept, because a full block in a block table is never
        replaced.

        Raises:
            RuntimeError: the block is the null block.
        """
        if block_id == NULL_BLOCK:
            raise RuntimeError("the null block is registered")
        if block_hash in self._block_by_hash:
            return False
        self._block_by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def forget(self, block_id: int) -> None:
        """Remove the hash of a used block, because its content will change."""
        old_hash = self._hashes[block_id]
        if old_hash is not None:
            del self._block_by_hash[old_hash]
            self._hashes[block_id] = None

    def check_invariants(self, owners: Counter[int]) -> None:
        """Check the pool against ``owners``, the number of block tables that contain each block.

        Raises:
            RuntimeError: a reference count, the free list or a registered hash is wrong.
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
