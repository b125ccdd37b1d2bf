"""Records which blocks the prefix cache holds, for routers in other processes."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from paged_backend.core.block_hash import DIGEST_SIZE
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.lora import LoRARequest


class KnownBlock(NamedTuple):
    """The content of a block, which is the same in all KV cache groups."""

    block_hash: bytes
    parent_hash: bytes | None  # hash of the block before it
    token_ids: list[int]
    has_known_parent: bool
    lora: LoRARequest | None  # the adapter that it was computed with first


class BlockAdded(NamedTuple):
    """A block can be found in a group from now on."""

    block: KnownBlock
    group: int


class BlockEvicted(NamedTuple):
    """A block can no longer be found in a group."""

    block_hash: bytes
    group: int


CacheChange = BlockAdded | BlockEvicted


class CacheState(NamedTuple):
    """What can be found at one moment."""

    layout: KVCacheLayout
    blocks: list[KnownBlock]  # each after the block before it
    keys: set[bytes]  # keys of the pool that can be found

    def changes_from_empty(self) -> list[CacheChange]:
        """Return changes that lead from an empty cache to this state.

        A block that can no longer be found is also added if a block after it can, because a router
        names a block by all tokens before it. The last changes evict such blocks again.
        """
        added: list[CacheChange] = []
        evicted: list[CacheChange] = []
        for group in range(self.layout.num_groups):
            for block in self.blocks:
                can_be_found = key_of(block.block_hash, group) in self.keys
                if can_be_found or group == 0:
                    added.append(BlockAdded(block, group))
                if not can_be_found and group == 0:
                    evicted.append(BlockEvicted(block.block_hash, group))
        return added + evicted


class CacheJournal:
    """The changes of a prefix cache since they were last taken, and its present state.

    Blocks of requests with a ``cache_salt`` must not be added, because their tokens belong to those
    who know the salt. Only the engine's thread uses a journal.

    The content of a block is kept as long as the block can be found, or a block after it is kept.

    Args:
        layout: the block size and the KV cache groups.
    """

    def __init__(self, layout: KVCacheLayout) -> None:
        self.layout = layout
        self._changes: list[CacheChange] = []
        self._blocks: dict[bytes, KnownBlock] = {}  # by hash
        self._keys: set[bytes] = set()
        # By hash: the number of groups in which the block can be found, and of blocks after it.
        self._num_uses: Counter[bytes] = Counter()

    def add(
        self,
        block_hash: bytes,
        parent_hash: bytes | None,
        token_ids: list[int],
        group: int,
        lora: LoRARequest | None = None,
    ) -> None:
        """Note that a block can be found in a group, which it could not before."""
        block = self._blocks.get(block_hash)
        if block is None:
            has_parent = parent_hash in self._blocks
            block = KnownBlock(block_hash, parent_hash, token_ids, has_parent, lora)
            self._blocks[block_hash] = block
            if parent_hash is not None and block.has_known_parent:
                self._num_uses[parent_hash] += 1
        self._num_uses[block_hash] += 1
        self._keys.add(key_of(block_hash, group))
        self._changes.append(BlockAdded(block, group))

    def evict(self, key: bytes) -> None:
        """Note that a block can no longer be found; keys that were not added are ignored.

        Args:
            key: the key of the block in the pool.
        """
        if key not in self._keys:
            return
        self._keys.remove(key)
        block_hash, group = key[:DIGEST_SIZE], key[DIGEST_SIZE:]
        self._changes.append(BlockEvicted(block_hash, group[0] if group else 0))
        self._drop_use(block_hash)

    def take(self) -> list[CacheChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def state(self) -> CacheState:
        """Return the present state, in a copy that no later change alters."""
        return CacheState(self.layout, list(self._blocks.values()), set(self._keys))

    def _drop_use(self, block_hash: bytes) -> None:
        """Forget a block that nothing uses any more, and the blocks before it that only it used."""
        while True:
            self._num_uses[block_hash] -= 1
            if self._num_uses[block_hash]:
                return
            del self._num_uses[block_hash]
            block = self._blocks.pop(block_hash)
            if block.parent_hash is None or not block.has_known_parent:
                return
            block_hash = block.parent_hash


def key_of(block_hash: bytes, group: int) -> bytes:
    """Return the key under which a pool registers a block of a group."""
    return block_hash + bytes([group]) if group else block_hash
