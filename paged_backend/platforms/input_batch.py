"""A step as flat arrays: the tokens of all scheduled sequences, concatenated without padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged_backend.core.scheduled_batch import (
    ContinuedSequences,
    PoolSpec,
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    WorkerSequence,
)

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Number = TypeVar("Number", bound=np.number[Any])


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The inputs of a model and of attention for one step, on the host."""

    input_ids: Longs  # [num_tokens]; PLACEHOLDER for a token that only the device knows
    positions: Ints  # [num_tokens]
    slot_mappings: Longs  # [num_groups, num_tokens]
    query_start_loc: Ints  # [num_seqs + 1]
    seq_lens: Ints  # [num_seqs]
    logits_indices: Longs  # [num_samples] rows with a next token to sample
    sample_positions: Ints  # [num_samples] positions of the tokens to sample
    num_decodes: int  # number of leading sequences with exactly one query token
    continued: list[WorkerSequence]  # the first sequences, which sample one token each
    scheduled_samples: list[SampleSpec]  # samples of the other sequences
    prompt_indices: Longs  # rows before the prompt tokens with log-probabilities that are needed
    prompts: list[PromptLogprobsSpec]  # the specs of these rows, in order
    pool_indices: Longs  # rows that are pooled; there are then no samples and no prompts
    pools: list[PoolSpec]  # the specs of these rows, in order
    # [num_seqs, 2] slots of the states that each sequence reads and writes; [0, 2] without states.
    state_slots: Ints
    # [num_slices, 9] of the slices that depend on tokens in flight: the index of the sequence; the
    # index and the number of its tokens; the position of the first one as if all drafts in flight
    # were right; the index, the number and the first position of its samples; 1 if drafts are in
    # flight; 1 if its own drafts are placeholders.
    ahead: Ints

    @property
    def samples(self) -> list[SampleSpec]:
        """One for each entry of `logits_indices`; made when asked for."""
        pairs = zip(self.continued, self.sample_positions.tolist(), strict=False)
        return [seq.sample(position) for seq, position in pairs] + self.scheduled_samples

    @property
    def needed_indices(self) -> Longs:
        """Rows with hidden states that are needed: the samples' rows, then `other_indices`."""
        if not len(self.other_indices):
            return self.logits_indices
        return np.concatenate((self.logits_indices, self.other_indices))

    @property
    def other_indices(self) -> Longs:
        """Rows for prompt log-probabilities, or for embeddings."""
        return self.pool_indices if self.pools else self.prompt_indices


_NO_STATES: Ints = np.zeros((0, 2), np.int32)
_NONE_AHEAD: Ints = np.zeros((0, 9), np.int32)


class InputBatchBuilder:
    """Builds the inputs of each step; inputs of continued decodes follow from the step before.

    Args:
        block_size: tokens in a block.
        num_groups: the KV cache groups.
    """

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        # Of the decodes of the previous step.
        self._positions: Ints = np.zeros(0, np.int32)  # [num_seqs]
        self._slots: Longs = np.zeros((num_groups, 0), np.int64)  # [num_groups, num_seqs]

    def build(self, scheduled_batch: ScheduledBatch) -> InputBatch:
        """Flatten the next step; the number of array operations does not depend on its size."""
        if not scheduled_batch.continued.sequences:
            batch = self._flatten(scheduled_batch.scheduled, scheduled_batch.lead)
        else:
            batch = self._continue(scheduled_batch.continued)
            if scheduled_batch.scheduled:
                others = self._flatten(scheduled_batch.scheduled, scheduled_batch.lead)
                batch = _joined(batch, others)
        if scheduled_batch.state_slots:
            slots = np.array(scheduled_batch.state_slots, np.int32)
            batch = replace(batch, state_slots=slots)
        num_decodes = len(batch.continued) + scheduled_batch.num_decodes
        self._positions = batch.positions[:num_decodes]
        self._slots = batch.slot_mappings[:, :num_decodes]
        return batch

    def _continue(self, continued: ContinuedSequences) -> InputBatch:
        positions = without(self._positions, continued.dropped) + np.int32(1)
        slots = np.ascontiguousarray(without(self._slots, continued.dropped)) + 1
        sequences, entering = continued.sequences, continued.entering
        if entering:
            # The last block may be a later one, which was allocated for drafts that were wrong.
            places = positions[entering] // self._block_size * self._num_groups
            blocks = [
                sequences[index].block_ids[place : place + self._num_groups]
                for index, place in zip(entering, places.tolist(), strict=True)
            ]
            slots[:, entering] = np.array(blocks, np.int64).T * self._block_size
        number = len(sequences)
        rows = np.arange(number + 1, dtype=np.int32)
        seq_lens = positions + np.int32(1)
        return InputBatch(
            input_ids=np.array([seq.token_ids[-1] for seq in sequences], np.int64),
            positions=positions,
            slot_mappings=slots,
            query_start_loc=rows,
            seq_lens=seq_lens,
            logits_indices=rows[:-1].astype(np.int64),
            sample_positions=seq_lens,
            num_decodes=number,
            continued=sequences,
            scheduled_samples=[],
            prompt_indices=np.zeros(0, np.int64),
            prompts=[],
            pool_indices=np.zeros(0, np.int64),
            pools=[],
            state_slots=_NO_STATES,
            ahead=_NONE_AHEAD,
        )

    def _flatten(self, items: list[ScheduledSequence], lead: int = 0) -> InputBatch:
        lens = np.array([len(item.token_ids) for item in items], np.int32)
        starts = np.array([item.start for item in items], np.int32)
        query_start_loc = np.zeros(len(items) + 1, np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        positions = np.arange(num_tokens, dtype=np.int32)
        positions += np.repeat(starts - query_start_loc[:-1], lens)
        num_samples = [len(item.samples) for item in items]
        samples = [sample for item in items for sample in item.samples]
        sample_positions = np.array([sample.position for sample in samples], np.int32)
        # A sample is drawn from the row with the token before it as its input.
        first_rows = np.repeat(query_start_loc[:-1] - starts, num_samples)
        longer = np.flatnonzero(lens != 1)
        return InputBatch(
            input_ids=np.fromiter(
                chain.from_iterable(item.token_ids for item in items), np.int64, num_tokens
            ),
            positions=positions,
            slot_mappings=self._slots_of(items, starts, lens, positions),
            query_start_loc=query_start_loc,
            seq_lens=starts + lens,
            logits_indices=(first_rows + sample_positions - (1 + lead)).astype(np.int64),
            sample_positions=sample_positions,
            num_decodes=int(longer[0]) if len(longer) else len(items),
            continued=[],
            scheduled_samples=samples,
            prompt_indices=_prompt_indices(items, query_start_loc),
            prompts=[item.prompt_logprobs for item in items if item.prompt_logprobs is not None],
            pool_indices=pool_indices(items, query_start_loc),
            pools=[item.pool for item in items if item.pool is not None],
            state_slots=_NO_STATES,
            ahead=_ahead(items, query_start_loc, num_samples),
        )

    def _slots_of(
        self, items: list[ScheduledSequence], starts: Ints, lens: Ints, positions: Ints
    ) -> Longs:
        """Return the slot of each token in each group; reads only the blocks that are written."""
        block_size, num_groups = self._block_size, self._num_groups
        first = starts // block_size
        counts = (starts + lens - 1) // block_size - first + 1
        written = np.fromiter(
            chain.from_iterable(
                item.block_ids[begin : begin + count]
                for item, begin, count in zip(
                    items,
                    (first * num_groups).tolist(),
                    (counts * num_groups).tolist(),
                    strict=True,
                )
            ),
            np.int64,
            int(counts.sum()) * num_groups,
        )
        before = np.cumsum(counts) - counts - first
        places = np.repeat(before, lens) + positions // block_size
        blocks = np.take(written.reshape(-1, num_groups).T, places, axis=1)
        slots: Longs = blocks * block_size + positions % block_size
        return slots


def without(values: NDArray[Number], dropped: list[int]) -> NDArray[Number]:
    """Return an array without the given indices of its last axis."""
    return np.delete(values, dropped, axis=-1) if dropped else values


def _joined(first: InputBatch, second: InputBatch) -> InputBatch:
    """Join decodes and the sequences that follow them."""
    row = len(first.input_ids)
    moved = np.array(
        [row, row, 0, 0, row, 0, 0, 0, 0], np.int32
    )  # each of them has one token and sample
    return replace(
        second,
        input_ids=np.concatenate((first.input_ids, second.input_ids)),
        positions=np.concatenate((first.positions, second.positions)),
        slot_mappings=np.concatenate((first.slot_mappings, second.slot_mappings), axis=1),
        query_start_loc=np.concatenate(
            (first.query_start_loc[:-1], second.query_start_loc + np.int32(row))
        ),
        seq_lens=np.concatenate((first.seq_lens, second.seq_lens)),
        logits_indices=np.concatenate((first.logits_indices, second.logits_indices + row)),
        sample_positions=np.concatenate((first.sample_positions, second.sample_positions)),
        num_decodes=first.num_decodes + second.num_decodes,
        continued=first.continued,
        prompt_indices=second.prompt_indices + row,
        pool_indices=second.pool_indices + row,
        ahead=second.ahead + moved if len(second.ahead) else second.ahead,
    )


def block_tables(scheduled_batch: ScheduledBatch, num_groups: int = 1) -> Ints:
    """Return the block tables of all sequences, padded with the null block.

    The result is [num_groups, num_seqs, longest table] int32.
    """
    tables = [seq.block_ids for seq in scheduled_batch.continued.sequences]
    tables += [item.block_ids for item in scheduled_batch.scheduled]
    widths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), int(widths.max())), np.int32)
    filled = np.arange(padded.shape[1]) < widths[:, None]
    ids = chain.from_iterable(tables)
    padded[filled] = np.fromiter(ids, np.int32, int(widths.sum()))
    return np.ascontiguousarray(padded.reshape(len(tables), -1, num_groups).transpose(2, 0, 1))


def _ahead(items: list[ScheduledSequence], query_start_loc: Ints, num_samples: list[int]) -> Ints:
    """Return `InputBatch.ahead`."""
    found: list[tuple[int, ...]] = []
    first_sample = 0
    for place, item in enumerate(items):
        if item.max_move or item.draws_drafts:
            first, number = int(query_start_loc[place]), len(item.token_ids)
            samples = (first_sample, len(item.samples), item.samples[0].position)
            flags = (int(item.max_move > 0), int(item.draws_drafts))
            found.append((place, first, number, item.start, *samples, *flags))
        first_sample += num_samples[place]
    return np.array(found, np.int32) if found else _NONE_AHEAD


def _prompt_indices(items: list[ScheduledSequence], query_start_loc: Ints) -> Longs:
    parts = [
        start + np.arange(len(item.prompt_logprobs.token_ids))
        for item, start in zip(items, query_start_loc.tolist(), strict=False)
        if item.prompt_logprobs is not None
    ]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def pool_indices(items: list[ScheduledSequence], query_start_loc: Ints) -> Longs:
    """Return the rows of a step that are pooled.

    Args:
        items: the slices of the step.
        query_start_loc: [num_seqs + 1] the first row of each slice, and the number of rows.
    """
    parts = [
        start + item.pool.first_row + np.arange(item.pool.num_rows)
        for item, start in zip(items, query_start_loc.tolist(), strict=False)
        if item.pool is not None
    ]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
