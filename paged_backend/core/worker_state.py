"""The worker's copy of all scheduled sequences, which each SchedulerOutput updates."""

from __future__ import annotations

from paged_backend.core.scheduled_batch import (
    ContinuedSequences,
    PoolSpec,
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    WorkerSequence,
)
from paged_backend.core.scheduler_output import ContinuedDecodes, SchedulerOutput, Slice
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.values.pooling_params import PoolingType


class WorkerState:
    """Turns each SchedulerOutput into a ScheduledBatch, with complete block tables.

    Args:
        pooling: the hidden states that become embeddings; None if the model generates.
    """

    def __init__(self, pooling: PoolingType | None = None) -> None:
        self._pooling = pooling
        self._sequences: dict[int, WorkerSequence] = {}  # by seq_id
        self._decodes: list[WorkerSequence] = []  # decodes of the previous step

    def apply(self, output: SchedulerOutput) -> ScheduledBatch:
        """Apply the next message. The caller must apply every message, in order."""
        for seq_id in output.freed_seq_ids:
            self._sequences.pop(seq_id, None)
        for new in output.new_sequences:
            tokens = list(new.token_ids)
            self._sequences[new.seq_id] = WorkerSequence(new, tokens, len(tokens))
        continued = self._continue(output.continued)
        scheduled = [self._scheduled(item) for item in output.slices]
        new_decodes = scheduled[: output.num_decodes]
        self._decodes = continued.sequences + [self._sequences[s.seq_id] for s in new_decodes]
        return ScheduledBatch(
            continued,
            scheduled,
            output.num_decodes,
            output.block_copies,
            output.freed_seq_ids,
            output.state_slots,
        )

    def _continue(self, continued: ContinuedDecodes) -> ContinuedSequences:
        """Update the decodes of the previous step that continue."""
        sequences = self._decodes
        if continued.dropped:
            dropped = set(continued.dropped)
            sequences = [seq for i, seq in enumerate(sequences) if i not in dropped]
        for seq, token_id in zip(sequences, continued.new_token_ids, strict=True):
            seq.continue_after(token_id)
        for index, block_ids in continued.new_block_ids:
            sequences[index].block_ids += block_ids
        entering = [index for index, _ in continued.new_block_ids]
        return ContinuedSequences(continued.dropped, sequences, entering)

    def _scheduled(self, item: Slice) -> ScheduledSequence:
        state = self._sequences[item.seq_id]
        _update(state, item)
        start, end = item.start, item.start + item.num_tokens
        if self._pooling is not None:
            return ScheduledSequence(
                item.seq_id,
                state.token_ids[start:end],
                start,
                state.block_ids,
                (),
                first_new_block=item.first_new_block,
                pool=_pool(item, self._pooling),
            )
        return ScheduledSequence(
            item.seq_id,
            state.token_ids[start:end],
            start,
            state.block_ids,
            tuple([self._sequences[seq_id].sample(end) for seq_id in item.sample_seq_ids])
            if not item.draft_token_ids
            else _samples_of_drafts(item, state, end),
            _prompt_logprobs(item, state),
            item.first_new_block,
            len(item.draft_token_ids),
            adapter=state.new.adapter,
            max_move=max(0, start - state.num_known),
            reference_token_ids=item.reference_token_ids,
        )


def _update(seq: WorkerSequence, item: Slice) -> None:
    # In place, because samples in flight read the list.
    seq.token_ids[seq.num_known :] = item.new_token_ids
    seq.num_known = len(seq.token_ids)
    missing = item.start + item.num_tokens - len(item.draft_token_ids) - seq.num_known
    if missing > 0:
        seq.token_ids += [PLACEHOLDER] * missing
    seq.token_ids += item.draft_token_ids
    if item.new_block_ids:
        seq.block_ids[item.first_new_block :] = item.new_block_ids


def _prompt_logprobs(item: Slice, seq: WorkerSequence) -> PromptLogprobsSpec | None:
    if item.num_prompt_logprobs is None:
        return None
    following = seq.token_ids[item.start + 1 : item.start + item.num_tokens + 1]
    with_logits = seq.new.params.return_context_logits
    return PromptLogprobsSpec(item.num_prompt_logprobs, following, with_logits)


def _samples_of_drafts(item: Slice, seq: WorkerSequence, end: int) -> tuple[SampleSpec, ...]:
    first = end - len(item.draft_token_ids)
    return tuple([seq.sample(place) for place in range(first, end + 1)])


def _pool(item: Slice, pooling: PoolingType) -> PoolSpec | None:
    """Return the rows of a slice that are pooled; None without any."""
    ends = bool(item.sample_seq_ids)
    match pooling:
        case PoolingType.LAST:
            return PoolSpec(item.seq_id, item.num_tokens - 1, 1, True, 1) if ends else None
        case PoolingType.CLS:
            first = item.start == 0
            return PoolSpec(item.seq_id, 0, int(first), first, 1 if ends else None)
        case PoolingType.MEAN:
            total = item.start + item.num_tokens if ends else None
            return PoolSpec(item.seq_id, 0, item.num_tokens, item.start == 0, total)
