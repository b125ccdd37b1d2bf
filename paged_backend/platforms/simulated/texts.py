"""Stands for the texts on a device, from which it draws drafts while steps are in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from paged_backend.core.scheduled_batch import ScheduledBatch, ScheduledSequence
from paged_backend.platforms.input_batch import Longs


class SimulatedTexts:
    """Keeps the texts of sequences, and completes the slices that depend on tokens in flight.

    Args:
        min_match: number of tokens that must be equal before a draft.
        max_match: number of tokens that are compared.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._texts: dict[int, list[int]] = {}  # by seq_id
        self._references: dict[int, Sequence[int]] = {}  # by seq_id, see Slice
        self.num_predicted: dict[int, int] = {}  # see ModelRunnerOutput, of the last step
        self.drafts: dict[int, list[int]] = {}  # those of the last step, by seq_id
        self._num_wrong: dict[int, int] = {}  # drafts of the last step

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences."""
        for seq_id in seq_ids:
            self._texts.pop(seq_id, None)
            self._references.pop(seq_id, None)
            self._num_wrong.pop(seq_id, None)

    def num_wrong(self, seq_id: int) -> int:
        """Return the number of wrong drafts in the last step of a sequence."""
        return self._num_wrong[seq_id]

    def complete(self, scheduled_batch: ScheduledBatch) -> ScheduledBatch:
        """Return a step as the device computes it, which knows the tokens of all earlier steps."""
        self.num_predicted, self.drafts = {}, {}
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
        if item.reference_token_ids:
            self._references[item.seq_id] = item.reference_token_ids
        if item.max_move:
            item = item.moved_back(self._num_wrong[item.seq_id])
        if item.draws_drafts:
            drafts = self.drafts[item.seq_id] = self._drafts(item)
            item = item.with_drafts(drafts)
        return item

    def _drafts(self, item: ScheduledSequence) -> list[int]:
        """Return what followed the newest of the longest matches of the end of a text.

        Of equally long ones, those in the prediction, or in the reference that has taken its place,
        are newer than those in the text.
        """
        text = np.array(self._texts[item.seq_id])
        before = self._references.get(item.seq_id, item.samples[0].predicted_token_ids)
        predicted = np.array(before, np.int64)
        start = len(text) - 1  # without a match, the last token repeats
        length, end = self._longest(text, text)
        if end is not None:
            start = end
        of_predicted, end = self._longest(predicted, text)
        if end is not None and of_predicted >= length:
            start = end - len(predicted)
        if start < 0 and item.seq_id not in self._references:
            self.num_predicted[item.seq_id] = min(-start, item.num_draft_tokens)
        texts = np.concatenate((predicted, text))
        size = len(text) - start
        places = len(predicted) + start + np.arange(item.num_draft_tokens) % size
        drafts: list[int] = texts[places].tolist()
        return drafts

    def _longest(self, within: Longs, text: Longs) -> tuple[int, int | None]:
        """Return the length of the longest match of the end of a text, and the newest such place.

        The place is the number of tokens before the one that follows; None if nothing matches.
        """
        ends = np.arange(1, len(within))
        longest, place = 0, None
        for length in range(1, min(self._max_match, len(text)) + 1):
            ends = ends[ends >= length]
            ends = ends[within[ends - length] == text[-length]]
            if not len(ends):
                break
            if length >= self._min_match:
                longest, place = length, int(ends[-1])
        return longest, place
