"""Manages block tables: prefix hits, growth, copy-on-write, forks and release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paged_backend.core.block_hash import BlockHasher
from paged_backend.core.block_pool import BlockPool
from paged_backend.core.sequence import Sequence

BlockCopies = list[tuple[int, int]]


class KVCacheManager:
    """Allocates and frees the blocks of all sequences, and finds cached prefixes.

    The block table of a sequence is its ``block_ids``.

    Args:
        num_blocks: size of the pool, the null block included.
        block_size: number of tokens in a block.
        enable_prefix_caching: whether to register full blocks, so that other sequences find them.
        hash_key: the secret key of the block hashes; random by default.
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
        """Return the number of blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Return the number of blocks that the sequence lacks to have a slot for each token.

        After wrong drafts it may have more blocks than its tokens need.
        """
        return max(0, self.num_blocks_for(seq.num_tokens) - len(seq.block_ids))

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return the prefix hits: registered blocks that hold the first tokens of the sequence.

        The hits may be used or free. They never include the last token, because a step must compute
        it to get its logits.
        """
        hits: list[int] = []
        for block_hash in self._hashes_up_to(seq, seq.num_tokens - 1):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def num_blocks_to_admit(self, seq: Sequence, hits: list[int]) -> int:
        """Return the number of free blocks that the sequence takes to hold all of its tokens.

        Prefix hits that another sequence uses take no free block. Hits that are free count like
        new blocks.
        """
        idle_hits = sum(self.pool.ref_count(block_id) == 0 for block_id in hits)
        return self.num_blocks_for(seq.num_tokens) - len(hits) + idle_hits

    def take_prefix(self, seq: Sequence, hits: list[int]) -> None:
        """Make the hits from :meth:`find_prefix` the first blocks of a waiting sequence."""
        for block_id in hits:
            self.pool.share(block_id)
        seq.block_ids = list(hits)
        seq.num_computed_tokens = len(hits) * self.block_size

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> BlockCopies | None:
        """Allocate the blocks for the next ``num_new_tokens`` tokens of a sequence.

        The new tokens start in the sequence's partial block. If another sequence shares this block
        since a fork, a new block replaces it in the block table, and its content must be copied
        (copy-on-write)::

            | computed tokens        | num_new_tokens |
            | full blocks  | partial block  | new blocks |
                             ^ copied if its reference count is above 1

        Returns:
            The block copies, as (from, to), to carry out before the step computes the tokens.
            ``None``, without any change, if the pool has too few free blocks.
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
        """Register the blocks that the tokens at positions ``start`` to ``end`` - 1 fill up.

        The tokens must be known, but need not be computed yet.
        """
        if end // self.block_size == start // self.block_size:
            return
        hashes = self._hashes_up_to(seq, end)
        for index in range(start // self.block_size, len(hashes)):
            self.pool.register(seq.block_ids[index], hashes[index])

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child continue from the parent's computed tokens, with the same blocks."""
        for block_id in parent.block_ids:
            self.pool.share(block_id)
        child.block_ids = list(parent.block_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens

    def release(self, seq: Sequence) -> None:
        """Release the blocks of a sequence.

        The last block is released first, so that the start of the prefix stays cached longest.
        """
        self.pool.release(reversed(seq.block_ids))
        seq.block_ids = []
        seq.num_computed_tokens = 0

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Check the reference counts against the block tables of ``sequences``.

        Raises:
            RuntimeError: the pool is inconsistent, or a sequence has computed tokens without a
                block.
        """
        owners: Counter[int] = Counter()
        for seq in sequences:
            owners.update(seq.block_ids)
            if len(seq.block_ids) * self.block_size < seq.num_computed_tokens:
                raise RuntimeError(f"sequence {seq.seq_id} has tokens without a block")
        self.pool.check_invariants(owners)

    def _hashes_up_to(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Return the hashes of the full blocks in the first tokens; keep them in the sequence."""
        if self._hasher is None:
            return []
        size, hashes = self.block_size, seq.block_hashes
        for index in range(len(hashes), num_tokens // size):
            parent = hashes[-1] if hashes else self._hasher.root(seq.request.cache_keys)
            tokens = seq.token_ids[index * size : (index + 1) * size]
            hashes.append(self._hasher.block(parent, tokens))
        return hashes[: num_tokens // size]
