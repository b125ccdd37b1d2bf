"""Slots for the states of sequences, which some layers keep in place of something per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from paged_backend.core.block_pool import NULL_BLOCK, BlockPool
from paged_backend.core.sequence import Sequence, State
from paged_backend.values.kv_cache_groups import StateLayout

ZERO_SLOT = NULL_BLOCK
"""The slot that is read at the start of a sequence: layers take its state as zero."""


class StateSlots:
    """Gives sequences slots for their states, and finds the states of cached prefixes.

    Each step reads the state of a sequence before the tokens that it computes, and writes the state
    after them. Both may have the same slot, unless the old state is still needed: another sequence
    has it, too (a fork), or the prefix cache keeps it (a *checkpoint*), or the step may have to be
    repeated: the sequence has a grammar, or the step computes drafts that may be wrong. After a
    wrong draft, the right ones before it are computed again, from the old state, in the next step.

    There are checkpoints at the border of the last full block of a prompt, at each multiple of
    ``layout.interval`` tokens, and where a prompt leaves one that came before: the blocks of both
    are equal up to this *branch*, and without a state there, each further prompt with the same
    beginning would be computed from an earlier checkpoint on. (Marconi, arXiv 2411.19379, keeps
    states at branches, too.) A slice of a prompt ends at a checkpoint (:meth:`cut`). A slot whose
    checkpoint no sequence needs stays cached until another state takes the slot.

    If the platform computes several tokens together (``layout.chunks``), all slices of a prompt but
    the last one end where such a chunk does, and so does the border. The slices then depend on
    other sequences, but no bit of a state does.

    Args:
        layout: the number of slots and the tokens between checkpoints.
        block_size: tokens of a block.
        key_of: function that returns the key of the block of a sequence that ends at a position;
            None if the prefix cache is off; no checkpoints are kept then.

    Attributes:
        pool: allocates the slots.
        num_started: the number of started sequences; the owner sets it before each step.
    """

    def __init__(
        self,
        layout: StateLayout,
        block_size: int,
        key_of: Callable[[Sequence, int], bytes] | None,
    ) -> None:
        self.pool = BlockPool(layout.num_slots)
        self.num_started = 0
        self._interval = layout.interval if key_of is not None else 0
        self._chunks = layout.chunks
        self._border_size = max(block_size, layout.chunks.size if layout.chunks else 1)
        self._key_of = key_of

    def num_places(self, num_started: int) -> int:
        """Return the number of further sequences that have room beside the started ones.

        A sequence that starts takes a slot to write to, and possibly a cached one to read. Each of
        the started ones may take another one, in place of a state that must not be overwritten.
        """
        return max(0, (self.pool.num_free - num_started) // 2)

    def has_checkpoint(self, key: bytes) -> bool:
        """Return True if the state after the block with this key is cached."""
        return self.pool.find(key) is not None

    def take_checkpoint(self, seq: Sequence, position: int, key: bytes) -> None:
        """Let a sequence that starts read the state after a cached prefix of ``position`` tokens.

        Raises:
            RuntimeError: there is no such checkpoint.
        """
        slot = self.pool.find(key)
        if slot is None:
            raise RuntimeError(f"sequence {seq.seq_id} starts after a prefix without a state")
        self.pool.share(slot)
        seq.states = [State(position, slot)]

    def note_branch(self, seq: Sequence, num_cached_tokens: int) -> None:
        """Let there be a checkpoint where the prompt of a sequence that starts leaves earlier ones.

        Args:
            seq: the sequence.
            num_cached_tokens: its first tokens in cached blocks.
        """
        end = min(num_cached_tokens, self._prompt_border(seq))
        seq.branch = end // self._border_size * self._border_size

    def cut(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Return the number of tokens from ``start`` on after which a slice of a text ends.

        It is ``num_tokens``, or less if there is a checkpoint before, or if a slice before the end
        of the text would divide a chunk. Then it may be 0.

        Args:
            seq: the sequence.
            start: the number of computed tokens.
            num_tokens: the largest number of tokens, with drafts after the end of the text. Of
                these there are only as many as are computed one by one.
        """
        num_tokens = self._cut_at_checkpoint(seq, start, num_tokens)
        if self._chunks is None:
            return num_tokens
        end = start + num_tokens
        if end > seq.num_tokens:
            return min(num_tokens, self._chunks.few)
        if end < seq.num_tokens:
            return max(0, end // self._chunks.size * self._chunks.size - start)
        return num_tokens

    @property
    def has_room_for_drafts(self) -> bool:
        """True if each started sequence can keep its state beside the one after its drafts."""
        return self.pool.num_free >= self.num_started

    def advance(
        self, seq: Sequence, num_tokens: int, *, has_drafts: bool = False
    ) -> tuple[int, int]:
        """Return the slots that the next tokens of a sequence read and write.

        Args:
            seq: the sequence.
            num_tokens: the number of tokens, with drafts.
            has_drafts: some of them are drafts, so that the old state is kept until the drafts are
                known to be right. The caller has checked `has_room_for_drafts`.
        """
        states, end = seq.states, seq.num_computed_tokens + num_tokens
        self._settle(seq)
        if not states:
            states.append(State(end, self.pool.allocate()))
            return ZERO_SLOT, states[0].slot
        newest = states[-1].slot
        if not has_drafts and self._may_overwrite(seq):
            states[-1] = State(end, newest)
            return newest, newest
        states.append(State(end, self.pool.allocate()))
        return newest, states[-1].slot

    def drop_drafts(self, seq: Sequence, number: int) -> None:
        """Record that the step that writes the newest state has fewer drafts than planned."""
        newest = seq.states[-1]
        seq.states[-1] = newest._replace(position=newest.position - number)

    def rewind(self, seq: Sequence) -> bool:
        """Drop the states after the computed tokens of a sequence, as their step is repeated.

        Returns:
            False if no state is left. Otherwise, the tokens after the newest one count as not
            computed.
        """
        while seq.states and seq.states[-1].position > seq.num_computed_tokens:
            self.pool.release([seq.states.pop().slot])
        if seq.states:
            seq.num_computed_tokens = seq.states[-1].position
        return bool(seq.states)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child read the parent's newest state."""
        newest = parent.states[-1]
        self.pool.share(newest.slot)
        child.states = [newest]

    def release(self, seq: Sequence) -> None:
        """Release the slots of a sequence; its checkpoints stay cached."""
        self._register(seq)
        self.pool.release(state.slot for state in reversed(seq.states))
        seq.states = []

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Check the reference counts of the slots against the states of ``sequences``.

        Raises:
            RuntimeError: the pool is inconsistent, or a sequence lacks the state that it needs.
        """
        owners: Counter[int] = Counter()
        for seq in sequences:
            owners.update(state.slot for state in seq.states)
            position = seq.states[-1].position if seq.states else 0
            if position != seq.num_computed_tokens:
                raise RuntimeError(
                    f"sequence {seq.seq_id} has the state after {position} tokens, but "
                    f"{seq.num_computed_tokens} are computed"
                )
        self.pool.check_invariants(owners)

    def _settle(self, seq: Sequence) -> None:
        """Register the newest state if it is a checkpoint, and release the states before it."""
        self._register(seq)
        self.pool.release(state.slot for state in seq.states[:-1])
        del seq.states[:-1]

    def _register(self, seq: Sequence) -> None:
        """Register the newest state of a sequence if it is a checkpoint.

        The tokens of a step in flight are known by now, but for those that it samples.
        """
        if self._key_of is None or not seq.states:
            return
        position, slot = seq.states[-1]
        if self._is_checkpoint(seq, position) and position <= seq.num_known_tokens:
            self.pool.register(slot, self._key_of(seq, position))

    def _cut_at_checkpoint(self, seq: Sequence, start: int, num_tokens: int) -> int:
        """Return ``num_tokens``, or less if there is a checkpoint before their end."""
        if not self._interval:
            return num_tokens
        multiple = (start // self._interval + 1) * self._interval
        ends = (multiple, seq.branch, self._prompt_border(seq))
        return min(num_tokens, *(end - start for end in ends if end > start))

    def _may_overwrite(self, seq: Sequence) -> bool:
        """Return True if the step can write over the newest state of a sequence.

        If slots are scarce, checkpoints are given up.
        """
        position, slot = seq.states[-1]
        if self.pool.ref_count(slot) > 1:
            return False
        is_kept = seq.grammar is not None or self._is_checkpoint(seq, position)
        if is_kept and self.pool.num_free > self.num_started:
            return False
        self.pool.forget(slot)
        return True

    def _is_checkpoint(self, seq: Sequence, position: int) -> bool:
        if not (self._interval and position):
            return False
        return position % self._interval == 0 or position in (
            seq.branch,
            self._prompt_border(seq),
        )

    def _prompt_border(self, seq: Sequence) -> int:
        """Return the number of tokens in the full blocks of a prompt, but for its last token.

        A border does not divide a chunk, either.
        """
        return (seq.num_prompt_tokens - 1) // self._border_size * self._border_size
