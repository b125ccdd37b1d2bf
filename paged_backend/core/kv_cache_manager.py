"""Manages block tables: prefix hits, growth, copy-on-write, forks, windows and release."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from paged_backend.core.block_hash import BlockHasher
from paged_backend.core.block_pool import NULL_BLOCK, BlockPool
from paged_backend.core.cache_journal import CacheJournal
from paged_backend.core.sequence import Sequence
from paged_backend.core.state_slots import StateSlots
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.windows import Window

BlockCopies = list[tuple[int, int]]


class KVCacheManager:
    """Allocates and frees the blocks of all sequences, and finds cached prefixes.

    The block tables of a sequence are its ``block_ids``. With several groups, entry
    ``index * num_groups + group`` is the block of a group for the tokens from
    ``index * block_size`` on. In a group with a window, the null block replaces the blocks that no
    later token sees. The allocated blocks of a table follow each other, up to its end.

    Args:
        num_blocks: size of the pool, the null block included; 1 for a model without a KV cache.
        layout: the groups of the model's layers.
        enable_prefix_caching: whether to register full blocks, so that other sequences find them.
        hash_key: the secret key of the block hashes; random by default.
        has_journal: whether to record what is registered and evicted.

    Attributes:
        journal: records the blocks that were registered and evicted; None without it.
        states: the slots for the states of sequences; None if no layer keeps a state.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVCacheLayout,
        *,
        enable_prefix_caching: bool,
        hash_key: bytes | None = None,
        has_journal: bool = False,
    ) -> None:
        journal = CacheJournal(layout) if has_journal else None
        self.journal = journal
        self.pool = BlockPool(num_blocks, None if journal is None else journal.evict)
        self.layout = layout
        self.block_size = layout.block_size
        self.num_groups = layout.num_groups
        self._sliding = tuple(layout.sliding)
        # Blocks of different groups hold the K and V of different layers.
        self._suffixes = [b"", *(bytes([group]) for group in range(1, layout.num_groups))]
        self._hasher = BlockHasher(hash_key) if enable_prefix_caching else None
        self.states: StateSlots | None = None
        if layout.states is not None:
            key_of = self._key_at if enable_prefix_caching else None
            self.states = StateSlots(layout.states, layout.block_size, key_of)

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Return the number of further blocks that the sequence takes to compute its tokens.

        After wrong drafts it may have more blocks than its tokens need.
        """
        position = _first_position(seq)
        num_held = len(seq.block_ids) - self.layout.num_invisible_blocks(position)
        return max(0, self.layout.max_blocks(position, seq.num_tokens) - num_held)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return the prefix hits: block tables with registered blocks for the first tokens.

        They are as long as possible. In groups without a window, each of these tokens has a block.
        In a group with a window, only the tokens that the next token still sees need one. The hits
        may be used or free. They never include the last token, because a step must compute it to
        get its logits. If layers keep a state, the state after these tokens is cached, too.
        """
        keys = self._keys_up_to(seq, seq.num_tokens - 1)
        if self.states is not None:
            self.states.note_branch(seq, self._num_cached_tokens(keys))
        is_one_table = self.num_groups <= 1 and not self._sliding and self.states is None
        return self._hits_of_one_table(keys) if is_one_table else self._hits_of_groups(keys)

    def num_hit_tokens(self, hits: list[int]) -> int:
        """Return the number of tokens in the hits from :meth:`find_prefix`."""
        return len(hits) // self.num_groups * self.block_size if hits else 0

    def num_blocks_to_admit(self, seq: Sequence, hits: list[int]) -> int:
        """Return the number of free blocks that the sequence takes to compute all of its tokens.

        Prefix hits that another sequence uses take no free block. Hits that are free count like
        new blocks.
        """
        num_shared = sum(self.pool.ref_count(block_id) > 0 for block_id in hits)
        return self.layout.max_blocks(self.num_hit_tokens(hits), seq.num_tokens) - num_shared

    def take_prefix(self, seq: Sequence, hits: list[int]) -> None:
        """Make the hits from :meth:`find_prefix` the first blocks of a waiting sequence."""
        for block_id in self._without_null(hits):
            self.pool.share(block_id)
        seq.block_ids = list(hits)
        seq.num_computed_tokens = self.num_hit_tokens(hits)
        if self.states is not None and hits:
            position = seq.num_computed_tokens
            self.states.take_checkpoint(seq, position, self._key_at(seq, position))

    def cut_chunk(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Return the number of tokens, up to ``num_tokens``, that a step computes from ``start``.

        A slice ends where the prefix cache keeps the state of a sequence, and divides no chunk of
        tokens that are computed together. So the result may be 0.
        """
        return num_tokens if self.states is None else self.states.cut(seq, start, num_tokens)

    def rewind(self, seq: Sequence) -> None:
        """Go back to the newest state of a sequence that no dropped token of a step has changed.

        Tokens after it count as not computed. Without such a state, the blocks are released.
        """
        if self.states is not None and not self.states.rewind(seq):
            self.release(seq)

    def free_invisible_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Free the blocks that no later token of the sequences sees.

        A step in flight may still read them; their next owner writes later.
        """
        if not self._sliding:
            return
        for seq in sequences:
            position, block_ids = _first_position(seq), seq.block_ids
            freed: list[int] = []
            for group, window in self._sliding:
                first = self.layout.first_visible_block(position, window)
                place = (first - 1) * self.num_groups + group
                while place >= 0 and block_ids[place] != NULL_BLOCK:
                    freed.append(block_ids[place])
                    block_ids[place] = NULL_BLOCK
                    place -= self.num_groups
            self.pool.release(freed)

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> BlockCopies | None:
        """Allocate the blocks for the next ``num_new_tokens`` tokens of a sequence.

        The new tokens start in the sequence's partial block. If another sequence shares this block
        since a fork, a new block replaces it in the block table, and its content must be copied
        (copy-on-write)::

            | computed tokens        | num_new_tokens |
            | full blocks  | partial block  | new blocks |
                             ^ copied if its reference count is above 1

        With several groups there are as many partial blocks. Only a fork shares them, so either all
        or none of them are shared.

        Returns:
            The block copies, as (from, to), to carry out before the step computes the tokens.
            ``None``, without any change, if the pool has too few free blocks.
        """
        num_groups, block_ids = self.num_groups, seq.block_ids
        first = seq.num_computed_tokens // self.block_size * num_groups
        shared = first < len(block_ids) and self.pool.ref_count(block_ids[first]) > 1
        end = seq.num_computed_tokens + num_new_tokens
        num_new_blocks = self.layout.num_blocks_for(end) * num_groups - len(block_ids)
        if num_new_blocks + shared * num_groups > self.pool.num_free:
            return None
        copies: BlockCopies = []
        if shared:
            partial = block_ids[first : first + num_groups]
            copies = [(block_id, self.pool.allocate()) for block_id in partial]
            self.pool.release(partial)
            block_ids[first : first + num_groups] = [target for _, target in copies]
        block_ids.extend(self.pool.allocate() for _ in range(num_new_blocks))
        return copies

    def register_full_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Register the blocks that the tokens at positions ``start`` to ``end`` - 1 fill up.

        The tokens must be known, but need not be computed yet.
        """
        if end // self.block_size == start // self.block_size:
            return
        keys, num_groups = self._keys_up_to(seq, end), self.num_groups
        first = start // self.block_size * num_groups
        for group in range(num_groups):
            for place in range(first + group, len(keys), num_groups):
                is_new = self.pool.register(seq.block_ids[place], keys[place])
                if is_new and self.journal is not None and not seq.request.is_private:
                    self._record(self.journal, seq, place // num_groups, group)

    def register_filled(self, seq: Sequence, num_tokens: int) -> None:
        """Register the blocks that the step fills, unless they contain a placeholder."""
        start = seq.num_computed_tokens
        if (start + num_tokens) // self.block_size == start // self.block_size:
            return
        end = min(start + num_tokens, seq.num_known_tokens)
        if end > start:
            self.register_full_blocks(seq, start, end)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child continue from the parent's computed tokens, with the same blocks."""
        for block_id in self._without_null(parent.block_ids):
            self.pool.share(block_id)
        child.block_ids = list(parent.block_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens
        if self.states is not None:
            self.states.fork(parent, child)

    def release(self, seq: Sequence) -> None:
        """Release the blocks of a sequence.

        The last block is released first, so that the start of the prefix stays cached longest.
        """
        if self.states is not None:
            self.states.release(seq)
        self.pool.release(self._without_null(reversed(seq.block_ids)))
        seq.block_ids = []
        seq.num_computed_tokens = 0

    def num_empty_slots(self, seq: Sequence) -> int:
        """Return the number of slots in the blocks of a sequence that hold no token."""
        return len(seq.block_ids) * self.block_size - seq.num_computed_tokens * self.num_groups

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Check the reference counts against the block tables of ``sequences``.

        Raises:
            RuntimeError: the pool is inconsistent, or a sequence lacks the block of a token
                that was computed and is still visible.
        """
        owners: Counter[int] = Counter()
        sequences = list(sequences)
        if self.states is not None:
            self.states.check_invariants(sequences)
        for seq in sequences:
            owners.update(self._without_null(seq.block_ids))
            for group, window in enumerate(self.layout.windows):
                table = seq.block_ids[group :: self.num_groups]
                if len(table) * self.block_size < seq.num_computed_tokens:
                    raise RuntimeError(f"sequence {seq.seq_id} has tokens without a block")
                first = 0
                if window is not None:
                    first = self.layout.first_visible_block(_first_position(seq), window)
                if NULL_BLOCK in table[first:]:
                    raise RuntimeError(f"sequence {seq.seq_id} lacks a block that it still sees")
        self.pool.check_invariants(owners)

    def _record(self, journal: CacheJournal, seq: Sequence, index: int, group: int) -> None:
        """Record that a full block of a sequence was registered in a group."""
        hashes, num_groups, start = seq.block_hashes, self.num_groups, index * self.block_size
        parent = hashes[(index - 1) * num_groups] if index else None
        tokens = seq.token_ids[start : start + self.block_size]
        journal.add(hashes[index * num_groups], parent, tokens, group, seq.request.lora)

    def _hits_of_one_table(self, keys: list[bytes]) -> list[int]:
        """Return the registered blocks up to the first key without one."""
        hits: list[int] = []
        for key in keys:
            block_id = self.pool.find(key)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _hits_of_groups(self, keys: list[bytes]) -> list[int]:
        """Return the longest block tables that are a hit in all groups."""
        num_groups = self.num_groups
        length = len(keys) // num_groups  # blocks of a table
        for group, window in enumerate(self.layout.windows):
            if window is None:
                table = keys[group::num_groups]
                length = next((i for i in range(length) if not self._is_cached(table[i])), length)
        longest = -1
        while length != longest:  # a shorter hit in one group moves the windows of the others
            longest = length
            for group, window in self._sliding:
                length = self._longest_visible_hit(keys[group::num_groups], length, window)
            length = self._longest_hit_with_state(keys[::num_groups], length)
        hits = [self.pool.find(key) or NULL_BLOCK for key in keys[: length * num_groups]]
        for group, window in self._sliding:
            first = self.layout.first_visible_block(length * self.block_size, window)
            hits[group : first * num_groups : num_groups] = [NULL_BLOCK] * first
        return hits

    def _longest_visible_hit(self, keys: list[bytes], length: int, window: Window) -> int:
        """Return the longest hit, up to ``length`` blocks, in a group with a window.

        It is a number of blocks after which the next token sees registered blocks only.
        """
        index = length
        while index > self.layout.first_visible_block(length * self.block_size, window):
            index -= 1
            if not self._is_cached(keys[index]):
                length = index
        return length

    def _longest_hit_with_state(self, keys: list[bytes], length: int) -> int:
        """Return the longest hit, up to ``length`` blocks, after which the state is cached."""
        if self.states is None:
            return length
        while length > 0 and not self.states.has_checkpoint(keys[length - 1]):
            length -= 1
        return length

    def _num_cached_tokens(self, keys: list[bytes]) -> int:
        """Return the number of first tokens in cached blocks, with a state after them or not.

        Only one group counts, and one without a window if there is any.
        """
        windows = self.layout.windows
        group = windows.index(None) if None in windows else 0
        cached = itertools.takewhile(self._is_cached, keys[group :: self.num_groups])
        return sum(1 for _ in cached) * self.block_size

    def _key_at(self, seq: Sequence, position: int) -> bytes:
        """Return the key of the full block of a sequence that ends at a position."""
        return self._keys_up_to(seq, position)[-self.num_groups]

    def _is_cached(self, key: bytes) -> bool:
        return self.pool.find(key) is not None

    def _without_null(self, block_ids: Iterable[int]) -> Iterable[int]:
        return filter(None, block_ids) if self._sliding else block_ids

    def _keys_up_to(self, seq: Sequence, num_tokens: int) -> list[bytes]:
        """Return the keys of the full blocks in the first tokens; keep them in the sequence.

        They are the hashes of the blocks, and for any group but the first, its number after it.
        """
        if self._hasher is None:
            return []
        size, num_groups, keys = self.block_size, self.num_groups, seq.block_hashes
        for index in range(len(keys) // num_groups, num_tokens // size):
            parent = keys[-num_groups] if keys else self._hasher.root(seq.request.cache_keys)
            tokens = seq.token_ids[index * size : (index + 1) * size]
            block_hash = self._hasher.block(parent, tokens)
            keys += [block_hash + suffix for suffix in self._suffixes]
        return keys[: num_tokens // size * num_groups]


def _first_position(seq: Sequence) -> int:
    """Return a lower bound on the position of the next token to compute.

    Drafts count as computed, and a wrong one is computed again. If layers keep a state, so is all
    that the step computes after the earlier state.
    """
    if seq.num_draft_tokens > 0 and len(seq.states) > 1:
        return seq.states[-2].position
    return seq.num_computed_tokens - seq.num_draft_tokens
