"""Starts waiting sequences in a step, and makes room for the siblings of a prompt."""

from __future__ import annotations

from paged_backend.core.admission import Admission
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.sequence import Sequence
from paged_backend.core.sequences import Sequences
from paged_backend.core.step import StepBuilder


class Starting:
    """Adds the prompts of waiting sequences to a step.

    Args:
        kv: the KV cache manager with the pool of blocks.
        sequences: the scheduler's sequences.
        admission: decides whether a sequence can start.
    """

    def __init__(self, kv: KVCacheManager, sequences: Sequences, admission: Admission) -> None:
        self._kv, self._sequences, self._admission = kv, sequences, admission

    def admit_waiting(self, step: StepBuilder, before: Sequence | None = None) -> None:
        """Start waiting sequences; only those that come before ``before``, if it is given."""
        if not self._sequences.waiting:
            return
        admission = self._admission
        num_free_seqs = admission.num_free_seqs() - self._num_forks(step)
        num_reserved = admission.num_reserved_blocks()
        while self._sequences.waiting and step.budget > 0:
            seq = self._sequences.waiting.first()
            key = self._sequences.waiting.priority_key
            if before is not None and key(seq) >= key(before):
                break
            if seq.num_output_placeholders > 0:  # preempted in this step: its last token is unknown
                break
            if num_free_seqs <= 0 or not admission.has_adapter_place(seq):
                break
            hits = admission.find_prefix(seq)
            num_tokens = admission.first_slice(seq, hits, step.budget)
            if num_tokens == 0 or not admission.has_room(seq, hits, num_reserved):
                break
            self._sequences.start(seq, hits)
            num_free_seqs -= 1
            if seq.num_computed_tokens + num_tokens == seq.num_tokens:
                num_free_seqs -= len(self._sequences.siblings.get(seq.seq_id, ()))
            copies = self._kv.allocate_slots(seq, num_tokens)
            if copies is None:
                raise RuntimeError(f"sequence {seq.seq_id} was admitted without room")
            step.add(seq, num_tokens, copies)
            # Charged at once, because the next sequence may then be another tenant's.
            self._sequences.charge_prompt(seq, num_tokens)
            if before is None:  # no sequence of this step can be preempted any more
                # Later sequences of the same step may use the blocks that this one fills: every
                # layer writes the K and V of all its tokens before any of them attends.
                self._kv.register_filled(seq, num_tokens)

    def queue_siblings(self, step: StepBuilder) -> None:
        """Queue the siblings without room, of prompts that this step computes to the end."""
        num_places = max(0, self._admission.num_free_seqs())
        for seq in self._forking(step):
            self._sequences.queue_siblings(seq, num_places)
            num_places -= len(self._sequences.siblings[seq.seq_id])

    def _num_forks(self, step: StepBuilder) -> int:
        """Return the number of siblings of the prompts that a step computes to the end."""
        return sum(len(self._sequences.siblings[seq.seq_id]) for seq in self._forking(step))

    def _forking(self, step: StepBuilder) -> list[Sequence]:
        """Return the sequences with siblings whose prompts a step computes to the end."""
        siblings = self._sequences.siblings
        if not siblings:
            return []
        return [
            seq
            for seq, num_tokens in step.slices()
            if seq.seq_id in siblings and seq.num_computed_tokens + num_tokens == seq.num_tokens
        ]
