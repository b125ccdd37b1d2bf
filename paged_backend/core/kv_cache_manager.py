"""Manages block tables: prefix hits, growth, copy-on-write, forks and release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paged_backend.core.block_hash import BlockHasher
from paged_backend.core.block_pool import BlockPool
from paged_backend.core.sequence import Sequence

BlockCopies = list[tuple[int, int]]


class KVCacheManager:
    """The block tables of all sequences over one pool.

    Args:
        num_blocks: size of the pool, the null block included.
        block_size: number of tokens in a block.
        enable_prefix_caching: whether the content of full blocks is registered.
        hash_key: of the block hashes; random by default.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        hash_key: bytes | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._hasher = BlockHasher(hash_key) if enable_prefix_caching else None

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, seq: Sequence) -> int:
        """The number of blocks to allocate before every token of the sequence has a slot."""
        return self.num_blocks_for(seq.num_tokens) - len(seq.block_ids)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return blocks that hold the K and V of the sequence's first tokens, used or free.

        They never cover the last token, because its logits must be computed.
        """
        hits: list[int] = []
        for block_hash in self._hashes_up_to(seq, seq.num_tokens - 1):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def num_blocks_to_admit(self, seq: Sequence, hits: list[int]) -> int:
        """The number of free blocks that the whole sequence takes, given its prefix hits."""
        idle_hits = sum(self.pool.ref_count(block_id) == 0 for block_id in hits)
        return self.num_blocks_for(seq.num_tokens) - len(hits) + idle_hits

    def take_prefix(self, seq: Sequence, hits: list[int]) -> None:
        """Start the block table of a waiting sequence with blocks from :meth:`find_prefix`."""
        for block_id in hits:
            self.pool.share(block_id)
        seq.block_ids = list(hits)
        seq.num_computed_tokens = len(hits) * self.block_size

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> BlockCopies | None:
        """Allocate slots for the next tokens; returns ``None`` if the pool has no room.

        The first block that is written may be shared since a fork. It is then replaced by a copy
        (copy-on-write). Returns the copies to make before the tokens are computed::

            | computed tokens        | num_new_tokens |
            | full blocks  | partial block  | new blocks |
                             ^ copied if its reference count is above 1
        """
        first = seq.num_computed_tokens // self.block_size
        shared = first < len(seq.block_ids) and self.pool.ref_count(seq.block_ids[first]) > 1
        end = seq.num_computed_tokens + num_new_tokens
        num_new_blocks = self.num_blocks_for(end) - len(seq.block_ids)
        if num_new_blocks + shared > self.pool.num_free:
            return None
        copies: BlockCopies = []
        if shared:
            copies.append((seq.block_ids[first], self.pool.allocate()))
            self.pool.release([seq.block_ids[first]])
            seq.block_ids[first] = copies[0][1]
        seq.block_ids.extend(self.pool.allocate() for _ in range(num_new_blocks))
        return copies

    def register_full_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Register the blocks that are full once the tokens from start to end are computed."""
        if end // self.block_size == start // self.block_size:
            return
        hashes = self._hashes_up_to(seq, end)
        for index in range(start // self.block_size, len(hashes)):
            self.pool.register(seq.block_ids[index], hashes[index])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a child with everything that its parent has computed; they share every block."""
        for block_id in parent.block_ids:
            self.pool.share(block_id)
        child.block_ids = list(parent.block_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens

    def release(self, seq: Sequence) -> None:
        """Release a sequence's blocks, the last one first, so that prefixes stay cached longest."""
        self.pool.release(reversed(seq.block_ids))
        seq.block_ids = []
        seq.num_computed_tokens = 0

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Compare reference counts with the block tables of all sequences.

        Raises:
            RuntimeError: they differ, or a table is too short for its sequence's tokens.
        """
        owners: Counter[int] = Counter()
        for seq in sequences:
            owners.update(seq.block_ids)
            if len(seq.block_ids) * self.block_size < seq.num_computed_tokens:
                raise RuntimeError(f"sequence {seq.seq_id} has tokens without a block")
        self.pool.check_invariants(owners)

    def _hashes_up_to(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Hashes of the full blocks among the first tokens; they are stored in the sequence."""
        if self._hasher is None:
            return []
        size, hashes = self.block_size, seq.block_hashes
        for index in range(len(hashes), num_tokens // size):
            parent = hashes[-1] if hashes else self._hasher.root(seq.request.cache_keys)
            tokens = seq.token_ids[index * size : (index + 1) * size]
            hashes.append(self._hasher.block(parent, tokens))
        return hashes[: num_tokens // size]
