"""The worker's copy of all scheduled sequences, which each SchedulerOutput updates."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_backend.core.scheduled_batch import (
    PoolSpec,
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
)
from paged_backend.core.scheduler_output import NewSequence, SchedulerOutput, Slice
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.pooling_params import PoolingType


@dataclass(slots=True)
class _State:
    """What the worker knows about one sequence."""

    new: NewSequence
    token_ids: list[int]  # known tokens, then drafts or placeholders of steps in flight
    num_known: int
    block_ids: list[int] = field(default_factory=list)

    def update(self, item: Slice) -> None:
        # In place, because samples in flight read the list.
        self.token_ids[self.num_known :] = item.new_token_ids
        self.num_known = len(self.token_ids)
        self.token_ids += item.draft_token_ids
        missing = item.start + item.num_tokens - len(self.token_ids)
        if missing > 0:
            self.token_ids += [PLACEHOLDER] * missing
        if item.new_block_ids:
            self.block_ids[item.first_new_block :] = item.new_block_ids


class WorkerState:
    """Turns each SchedulerOutput into a ScheduledBatch, with complete block tables.

    Args:
        pooling: the hidden states that become embeddings; None if the model generates.
    """

    def __init__(self, pooling: PoolingType | None = None) -> None:
        self._pooling = pooling
        self._states: dict[int, _State] = {}  # by seq_id

    def apply(self, output: SchedulerOutput) -> ScheduledBatch:
        """Apply the next message. The caller must apply every message, in order."""
        for seq_id in output.freed_seq_ids:
            self._states.pop(seq_id, None)
        for new in output.new_sequences:
            self._states[new.seq_id] = _State(new, list(new.token_ids), len(new.token_ids))
        return ScheduledBatch(
            [self._scheduled(item) for item in output.slices],
            output.block_copies,
            output.freed_seq_ids,
        )

    def _scheduled(self, item: Slice) -> ScheduledSequence:
        state = self._states[item.seq_id]
        state.update(item)
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
            tuple([self._sample(seq_id, end) for seq_id in item.sample_seq_ids])
            if not item.draft_token_ids
            else self._samples_of_drafts(item, end),
            self._prompt_logprobs(item, state),
            item.first_new_block,
            len(item.draft_token_ids),
        )

    def _prompt_logprobs(self, item: Slice, state: _State) -> PromptLogprobsSpec | None:
        if item.num_prompt_logprobs is None:
            return None
        following = state.token_ids[item.start + 1 : item.start + item.num_tokens + 1]
        with_logits = state.new.params.return_context_logits
        return PromptLogprobsSpec(item.num_prompt_logprobs, following, with_logits)

    def _samples_of_drafts(self, item: Slice, end: int) -> tuple[SampleSpec, ...]:
        first = end - len(item.draft_token_ids)
        return tuple([self._sample(item.seq_id, place) for place in range(first, end + 1)])

    def _sample(self, seq_id: int, position: int) -> SampleSpec:
        state = self._states[seq_id]
        new = state.new
        return SampleSpec(
            seq_id, new.params, new.seed, position, new.num_prompt_tokens, state.token_ids
        )


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
