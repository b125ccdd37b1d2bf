"""Builds the SchedulerOutput of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, takewhile
from typing import NamedTuple

from paged_backend.core.drafter import NO_DRAFT, Draft
from paged_backend.core.kv_cache_manager import BlockCopies, KVCacheManager
from paged_backend.core.scheduler_output import (
    ContinuedDecodes,
    NewSequence,
    SchedulerOutput,
    Slice,
)
from paged_backend.core.sequence import Sequence, SequenceStatus


class ScheduledStep(NamedTuple):
    """A step in flight, with the sequences that receive its output."""

    sampled: list[Sequence]  # one for each sample; the continued decodes come first
    num_continued: int
    # Sequences with prompt logprobs, each with the index of the slice's first logprob in the list.
    prompts: list[tuple[Sequence, int]]
    drafts: dict[int, Draft]  # by seq_id
    dropped_seq_ids: set[int]  # sequences with samples that are dropped: their masks were not known


class StepBuilder:
    """Collects the continued decodes and the slices of a step.

    Args:
        budget: maximum number of tokens in the step.
        earlier_decodes: the decodes of the previous step.
        sends_predictions: whether the worker looks for drafts in predictions.

    Attributes:
        budget: number of tokens that still fit in the step.
        continued: the continued decodes.
        decodes: decodes that the next step may continue, after `build`.
        drafts: the drafts by ``seq_id``; sequences without drafts are missing.
    """

    def __init__(
        self, budget: int, earlier_decodes: list[Sequence], *, sends_predictions: bool = False
    ) -> None:
        self.budget = budget
        self._sends_predictions = sends_predictions
        self.decodes: list[Sequence] = []
        self._earlier_decodes = earlier_decodes
        self.continued: list[Sequence] = []
        self._entering: list[tuple[int, Sequence]] = []
        self._slices: dict[int, tuple[Sequence, int, BlockCopies]] = {}  # by seq_id
        self.drafts: dict[int, Draft] = {}

    def continue_decodes(
        self, sequences: list[Sequence], entering: list[tuple[int, Sequence]]
    ) -> None:
        """Add the next token of sequences that the previous step decoded.

        Args:
            sequences: the sequences, in the order of the previous step.
            entering: the index and the sequence of those that got new blocks for this token.
        """
        self.continued, self._entering = sequences, entering
        self.budget -= len(sequences)

    def add(self, seq: Sequence, num_tokens: int, copies: BlockCopies) -> None:
        """Add the next ``num_tokens`` tokens of a sequence.

        Args:
            seq: the sequence, with blocks for these tokens.
            num_tokens: number of tokens to compute, without drafts.
            copies: block copies to make before the step computes the tokens.
        """
        self._slices[seq.seq_id] = (seq, num_tokens, copies)
        self.budget -= num_tokens

    def add_draft(self, seq: Sequence, draft: Draft) -> None:
        """Add guessed tokens after the tokens of a sequence in this step."""
        self.drafts[seq.seq_id] = draft
        self.budget -= len(draft.token_ids)

    def remove(self, seq: Sequence) -> None:
        """Remove the tokens of a sequence, if any; they return to the budget."""
        _, num_tokens, _ = self._slices.pop(seq.seq_id, (seq, 0, []))
        self.budget += num_tokens + len(self.drafts.pop(seq.seq_id, NO_DRAFT).token_ids)
        if seq in self.continued:
            place = self.continued.index(seq)
            del self.continued[place]
            self._entering = [
                (index - (index > place), other)
                for index, other in self._entering
                if other is not seq
            ]
            self.budget += 1

    def slices(self) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence with a slice, and the number of its tokens without drafts."""
        for seq, num_tokens, _ in self._slices.values():
            yield seq, num_tokens

    def build(
        self,
        siblings: Mapping[int, list[Sequence]],
        freed_seq_ids: list[int],
        kv: KVCacheManager,
    ) -> SchedulerOutput:
        """Return the message for the worker, with what has changed since the previous message.

        Args:
            siblings: the other completions of a request, by the ``seq_id`` of its first completion.
                They sample their first token in the step that computes the end of the prompt.
            freed_seq_ids: sequences that the worker must forget before the step.
            kv: the cache with the blocks and states of the sequences.
        """
        layout, new_sequences = kv.layout, list[NewSequence]()
        slices: list[Slice] = []
        block_copies: BlockCopies = []
        for seq, num_tokens, copies in self._slices.values():
            if seq.num_sent_tokens == 0:  # the worker does not know it
                new_sequences.append(self._introduce(seq))
            sample_seq_ids: list[int] = []
            if seq.num_computed_tokens + num_tokens == seq.num_tokens:
                sample_seq_ids.append(seq.seq_id)
                for sibling in siblings.get(seq.seq_id, ()):
                    new_sequences.append(self._introduce(sibling))
                    sample_seq_ids.append(sibling.seq_id)
            if copies:  # they replace the first blocks that are written
                first = seq.num_computed_tokens // layout.block_size * layout.num_groups
                seq.num_sent_blocks = min(seq.num_sent_blocks, first)
                block_copies += copies
            draft = self.drafts.get(seq.seq_id, NO_DRAFT)
            slices.append(_slice(seq, num_tokens, draft, sample_seq_ids))
        continued = self._continue()
        num_decodes = self._num_decodes(slices)
        new_decodes = [seq for seq, _ in islice(self.slices(), num_decodes)]
        self.decodes = self.continued + new_decodes
        return SchedulerOutput(
            freed_seq_ids,
            new_sequences,
            continued,
            slices,
            num_decodes,
            block_copies,
            self._advance_states(kv),
        )

    def _introduce(self, seq: Sequence) -> NewSequence:
        """Tell the worker about a sequence that it does not know."""
        seq.num_sent_tokens, seq.num_sent_blocks = seq.num_known_tokens, 0
        seq.sent_reference = []
        request = seq.request
        return NewSequence(
            seq.seq_id,
            request.params,
            seq.seed,
            seq.num_prompt_tokens,
            seq.token_ids[: seq.num_sent_tokens],
            seq.num_candidates,
            request.adapter,
            request.predicted_token_ids if self._sends_predictions else [],
        )

    def _advance_states(self, kv: KVCacheManager) -> list[tuple[int, int]]:
        """Return the slots of the states that the sequences of the step read and write."""
        if kv.states is None:
            return []
        slots = [kv.states.advance(seq, 1) for seq in self.continued]
        for seq, num_tokens in self.slices():
            num_drafts = len(self.drafts.get(seq.seq_id, NO_DRAFT).token_ids)
            has_drafts = num_drafts > 0
            slots.append(kv.states.advance(seq, num_tokens + num_drafts, has_drafts=has_drafts))
        return slots

    def _continue(self) -> ContinuedDecodes:
        """Return what the worker needs to continue decodes."""
        dropped: list[int] = []
        if len(self.continued) < len(self._earlier_decodes):
            kept = set(self.continued)
            dropped = [i for i, seq in enumerate(self._earlier_decodes) if seq not in kept]
        token_ids = []
        for seq in self.continued:
            token_ids.append(seq.token_ids[seq.num_sent_tokens])
            seq.num_sent_tokens += 1
        new_block_ids = []
        for index, seq in self._entering:
            new_block_ids.append((index, seq.block_ids[seq.num_sent_blocks :]))
            seq.num_sent_blocks = len(seq.block_ids)
        return ContinuedDecodes(dropped, token_ids, new_block_ids)

    def register_blocks(self, kv: KVCacheManager) -> None:
        """Register the blocks that the decodes and prompts of running sequences fill."""
        last_place = kv.block_size - 1
        for seq in self.continued:
            if seq.num_computed_tokens % kv.block_size == last_place:
                kv.register_filled(seq, 1)
        for seq, num_tokens in self.slices():
            kv.register_filled(seq, num_tokens)

    def _num_decodes(self, slices: list[Slice]) -> int:
        """Return the number of first slices that the next step may continue."""
        pairs = zip(self.slices(), slices, strict=True)
        return sum(1 for _ in takewhile(lambda pair: _may_continue(pair[0][0], pair[1]), pairs))


def _may_continue(seq: Sequence, item: Slice) -> bool:
    return (
        seq.can_continue
        and seq.num_draft_tokens == 0  # after drafts in flight, its position is not known
        and item.num_tokens == 1
        and item.sample_seq_ids == [seq.seq_id]
    )


def _slice(seq: Sequence, num_tokens: int, draft: Draft, sample_seq_ids: list[int]) -> Slice:
    """Return the next slice of a sequence, with what the worker lacks of it."""
    num_tokens_before, num_blocks_before = seq.num_sent_tokens, seq.num_sent_blocks
    seq.num_sent_tokens, seq.num_sent_blocks = seq.num_known_tokens, len(seq.block_ids)
    wants_logprobs = seq.wants_prompt_logprobs
    reference: list[int] = []
    if draft.reference is not seq.sent_reference and draft.reference:
        reference = seq.sent_reference = draft.reference
    return Slice(
        seq.seq_id,
        seq.num_computed_tokens,
        num_tokens + len(draft.token_ids),
        seq.token_ids[num_tokens_before : seq.num_sent_tokens],
        num_blocks_before,
        seq.block_ids[num_blocks_before:],
        draft.token_ids,
        sample_seq_ids,
        (seq.request.params.prompt_logprobs or 0) if wants_logprobs else None,
        reference,
    )


def can_be_continued(seq: Sequence) -> bool:
    """Return True if a decode of the previous step computes a token that the worker lacks."""
    num_tokens, num_placeholders = len(seq.token_ids), seq.num_output_placeholders
    return (
        seq.status is SequenceStatus.RUNNING
        and num_tokens == seq.num_computed_tokens + 1
        and seq.num_sent_tokens > 0
        and num_tokens == seq.num_sent_tokens + num_placeholders + 1
        and (num_placeholders == 0 or num_tokens < seq.max_num_tokens)
    )
