"""Stands for the texts on a device, from which it draws drafts while steps are in flight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from paged_backend.core.scheduled_batch import ScheduledBatch, ScheduledSequence


class SimulatedTexts:
    """Keeps the texts of sequences, and completes the slices that depend on tokens in flight.

    Args:
        min_match: number of tokens that must be equal before a draft.
        max_match: number of tokens that are compared.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._texts: dict[int, list[int]] = {}  # by seq_id
        self._num_wrong: dict[int, int] = {}  # drafts of the last step

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences."""
        for seq_id in seq_ids:
            self._texts.pop(seq_id, None)
            self._num_wrong.pop(seq_id, None)

    def num_wrong(self, seq_id: int) -> int:
        """Return the number of wrong drafts in the last step of a sequence."""
        return self._num_wrong[seq_id]

    def complete(self, scheduled_batch: ScheduledBatch) -> ScheduledBatch:
        """Return a step as the device computes it, which knows the tokens of all earlier steps."""
        scheduled = [self._completed(item) for item in scheduled_batch.scheduled]
        return replace(scheduled_batch, scheduled=scheduled)

    def keep(self, scheduled_batch: ScheduledBatch, token_ids: list[list[int]]) -> None:
        """Add the tokens of a step, without those after wrong drafts, to the texts."""
        kept = iter(token_ids)
        for item in scheduled_batch.all_sequences():
            for spec in item.samples[:1] if item.num_draft_tokens else item.samples:
                tokens = next(kept)
                if spec.seq_id not in self._texts:
                    self._texts[spec.seq_id] = spec.context
                self._texts[spec.seq_id] += tokens
                self._num_wrong[spec.seq_id] = item.num_draft_tokens + 1 - len(tokens)

    def _completed(self, item: ScheduledSequence) -> ScheduledSequence:
        if item.max_move:
            item = item.moved_back(self._num_wrong[item.seq_id])
        return item.with_drafts(self._drafts(item)) if item.draws_drafts else item

    def _drafts(self, item: ScheduledSequence) -> list[int]:
        """Return what followed the newest of the longest matches of the end of a text."""
        text = np.array(self._texts[item.seq_id])
        start = len(text) - 1  # without a match, the last token repeats
        ends = np.arange(1, len(text))
        for length in range(1, self._max_match + 1):
            ends = ends[ends >= length]
            ends = ends[text[ends - length] == text[-min(length, len(text))]]
            if not len(ends):
                break
            if length >= self._min_match:
                start = int(ends[-1])
        places = start + np.arange(item.num_draft_tokens) % (len(text) - start)
        drafts: list[int] = text[places].tolist()
        return drafts
