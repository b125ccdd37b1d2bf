"""A step as flat arrays: the tokens of all scheduled sequences, concatenated without padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from paged_backend.core.scheduled_batch import (
    PoolSpec,
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
)

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The inputs of a model and of attention for one step, on the host."""

    input_ids: Longs  # [num_tokens]; PLACEHOLDER for a token that only the device knows
    positions: Ints  # [num_tokens]
    slot_mappings: Longs  # [num_groups, num_tokens]
    query_start_loc: Ints  # [num_seqs + 1]
    seq_lens: Ints  # [num_seqs]
    logits_indices: Longs  # [num_samples] rows whose next token is sampled
    sample_positions: Ints  # [num_samples] positions of the tokens to sample
    num_decodes: int  # number of leading sequences with exactly one query token
    samples: list[SampleSpec]  # one for each entry of logits_indices
    prompt_indices: Longs  # rows before the prompt tokens whose log-probabilities are needed
    prompts: list[PromptLogprobsSpec]  # the specs of these rows, in order
    pool_indices: Longs  # rows that are pooled; there are then no samples and no prompts
    pools: list[PoolSpec]  # the specs of these rows, in order

    @classmethod
    def build(
        cls, scheduled_batch: ScheduledBatch, block_size: int, num_groups: int = 1
    ) -> InputBatch:
        """Flatten a step; the number of array operations does not depend on its size.

        Args:
            scheduled_batch: the step.
            block_size: tokens in a block.
            num_groups: the KV cache groups.
        """
        items = scheduled_batch.scheduled
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
        # A sample is drawn from the row of the token before it.
        first_rows = np.repeat(query_start_loc[:-1] - starts, num_samples)
        longer = np.flatnonzero(lens != 1)
        return cls(
            input_ids=np.fromiter(
                chain.from_iterable(item.token_ids for item in items), np.int64, num_tokens
            ),
            positions=positions,
            slot_mappings=_slots(items, starts, lens, positions, block_size, num_groups),
            query_start_loc=query_start_loc,
            seq_lens=starts + lens,
            logits_indices=(first_rows + sample_positions - 1).astype(np.int64),
            sample_positions=sample_positions,
            num_decodes=int(longer[0]) if len(longer) else len(items),
            samples=samples,
            prompt_indices=_prompt_indices(items, query_start_loc),
            prompts=[item.prompt_logprobs for item in items if item.prompt_logprobs is not None],
            pool_indices=pool_indices(items, query_start_loc),
            pools=[item.pool for item in items if item.pool is not None],
        )

    @property
    def needed_indices(self) -> Longs:
        """Rows whose hidden states are needed: those of the samples, then `other_indices`."""
        if not len(self.other_indices):
            return self.logits_indices
        return np.concatenate((self.logits_indices, self.other_indices))

    @property
    def other_indices(self) -> Longs:
        """Rows for prompt log-probabilities, or for embeddings."""
        return self.pool_indices if self.pools else self.prompt_indices


def block_tables(items: list[ScheduledSequence], num_groups: int = 1) -> Ints:
    """Return the block tables, padded with the null block.

    The result is [num_groups, num_seqs, longest table] int32.
    """
    widths = np.array([len(item.block_ids) for item in items])
    padded = np.zeros((len(items), int(widths.max())), np.int32)
    filled = np.arange(padded.shape[1]) < widths[:, None]
    ids = chain.from_iterable(item.block_ids for item in items)
    padded[filled] = np.fromiter(ids, np.int32, int(widths.sum()))
    return np.ascontiguousarray(padded.reshape(len(items), -1, num_groups).transpose(2, 0, 1))


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


def _slots(
    items: list[ScheduledSequence],
    starts: Ints,
    lens: Ints,
    positions: Ints,
    block_size: int,
    num_groups: int,
) -> Longs:
    """Return the slot of each token in each group; reads only the blocks that the step writes."""
    first = starts // block_size
    counts = (starts + lens - 1) // block_size - first + 1
    written = np.fromiter(
        chain.from_iterable(
            item.block_ids[begin : begin + count]
            for item, begin, count in zip(
                items, (first * num_groups).tolist(), (counts * num_groups).tolist(), strict=True
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
