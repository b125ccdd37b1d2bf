"""A model runner with a draft model, which guesses the next tokens before each step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.core.scheduled_batch import ScheduledBatch, ScheduledSequence
from paged_backend.core.scheduler_output import (
    DraftGuide,
    DraftPass,
    DrawnDrafts,
    LaunchedStep,
    PendingOutput,
    TokenMasks,
)
from paged_backend.platforms.base import DraftRunner, ModelRunner, PendingTokens
from paged_backend.platforms.drafted_slots import DraftedSlots
from paged_backend.values.kv_cache_groups import KVCacheLayout


@dataclass(frozen=True, slots=True)
class DraftedStep(LaunchedStep):
    """A step with the drafts that the worker has drawn for it; see LaunchedStep."""

    launched: LaunchedStep
    drawn: DrawnDrafts | None

    def drawn_drafts(self) -> DrawnDrafts | None:
        """Return what the draft model has drawn; None if the step needed no drafts of it."""
        return self.drawn

    def greedy_token_ids(self) -> Mapping[int, int]:
        """Return the tokens that only a mask can change."""
        return self.launched.greedy_token_ids()

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        """Sample the tokens of the step."""
        return self.launched.sample(masks)


class _Pass(NamedTuple):
    """A pass of the draft model that may still be computed."""

    rows: list[ScheduledSequence]
    tokens: PendingTokens


class DraftingRunner:
    """Draws the drafts of a step with a draft model, and lets the model compute the step.

    A draft is drawn like a token: from the logits of the draft model with the parameters, the seed
    and the position of the token. The draft model computes a sequence only when drafts are drawn
    for it, and first all tokens that it lacks. If these are too many for one step, the sequence
    has no drafts in this step.

    A device gets all passes of the draft model at once, and waits for the host only between them
    and the step that verifies the drafts. Masks depend on the drafts before them, so each pass
    waits for the one before it then.

    Args:
        main: runs the model.
        draft: runs the draft model, with a pool of as many blocks.
        layout: the groups of the block tables. The draft model uses the tables of the first group
            without a window.
    """

    def __init__(self, main: ModelRunner, draft: DraftRunner, layout: KVCacheLayout) -> None:
        self.main = main
        self._draft = draft
        self._slots = DraftedSlots(layout, layout.windows.index(None))
        self._num_groups = layout.num_groups
        self._max_num_tokens = layout.max_num_batched_tokens  # that the draft model computes
        # By seq_id: the number of first entries of its block table that the draft runner has.
        self._num_sent: dict[int, int] = {}

    @property
    def model_seconds(self) -> float | None:
        """Seconds spent in forward passes so far, of both models; None if nobody waits for them."""
        main, draft = self.main.model_seconds, self._draft.model_seconds
        return None if main is None or draft is None else main + draft

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        return self.main.attention_backend

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return self.main.num_graphs + self._draft.num_graphs

    def launch(self, scheduled_batch: ScheduledBatch) -> DraftedStep:
        """Draw the drafts of a step, and start the computation of its hidden states and logits."""
        self._note(scheduled_batch)
        waiting = {item.seq_id: item for item in scheduled_batch.scheduled if item.draws_drafts}
        if not waiting:
            return DraftedStep(self.main.launch(scheduled_batch), None)
        drawn = self._draw(waiting, scheduled_batch.guide)
        return DraftedStep(self.main.launch(scheduled_batch.with_drafts(drawn.token_ids)), drawn)

    def _note(self, batch: ScheduledBatch) -> None:
        """Take note of what a step changes in the blocks of sequences."""
        self._draft.release(batch.freed_seq_ids)
        for seq_id in batch.freed_seq_ids:
            self._num_sent.pop(seq_id, None)
        if batch.block_copies:
            self._draft.copy_blocks(batch.block_copies)
            self._slots.copy(batch.block_copies)
        for item in batch.scheduled:
            if item.seq_id in self._num_sent:
                first = item.first_new_block // self._num_groups
                self._num_sent[item.seq_id] = min(self._num_sent[item.seq_id], first)
        self._slots.overwrite(batch)

    def _draw(
        self, waiting: Mapping[int, ScheduledSequence], guide: DraftGuide | None
    ) -> DrawnDrafts:
        """Return the drafts of sequences, and the passes that draw one token of each."""
        drafts: dict[int, list[int]] = {seq_id: [] for seq_id in waiting}
        passes: list[DraftPass] = []
        launched: list[_Pass] = []
        goes_ahead = self._draft.chains_passes and guide is None
        num_passes, started_s = 0, time.perf_counter()
        rows, masks = _masked(self._first_rows(waiting.values()), drafts, guide)
        while rows or launched:
            if rows:
                launched.append(_Pass(rows, self._draft.draw(ScheduledBatch.of(rows), masks)))
                for row in rows:
                    self._slots.add(row.block_ids, row.start, row.start + len(row.token_ids))
                num_passes += 1
            if not (rows and goes_ahead):
                passes.append(_received(launched.pop(0), drafts, started_s))
                started_s += passes[-1].seconds
            rows, masks = _masked(_next_rows(rows, waiting, num_passes), drafts, guide)
        return DrawnDrafts(drafts, passes)

    def _first_rows(self, waiting: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the tokens that the draft model lacks, as many as it can compute at once.

        A sequence with all of its tokens samples its first draft.
        """
        rows: list[ScheduledSequence] = []
        room = self._max_num_tokens
        for item in waiting:
            table = self._slots.table(item.block_ids)
            end = item.samples[0].position
            start = self._slots.number(table, item.start)
            stop = min(end, start + room)
            room -= stop - start
            if stop > start:
                samples = item.samples[:1] if stop == end else ()
                token_ids = item.samples[0].token_ids[start:stop]
                first_new_block = self._num_sent.get(item.seq_id, 0)
                self._num_sent[item.seq_id] = len(table)
                rows.append(
                    ScheduledSequence(
                        *(item.seq_id, token_ids, start, table, samples),
                        first_new_block=first_new_block,
                    )
                )
        return sorted(rows, key=lambda row: len(row.token_ids) > 1)  # decodes come first


def _next_rows(
    rows: list[ScheduledSequence], waiting: Mapping[int, ScheduledSequence], number: int
) -> list[ScheduledSequence]:
    """Return the rows of the next pass.

    Args:
        rows: the rows of a pass, which samples a draft of each row with samples.
        waiting: the sequences with drafts, by ``seq_id``.
        number: number of drafts that each of these rows has after the pass.
    """
    following: list[ScheduledSequence] = []
    for row in rows:
        samples = waiting[row.seq_id].samples[number : number + 1]
        # The last sample of a sequence follows its last draft, and is not a draft.
        if row.samples and number < waiting[row.seq_id].num_draft_tokens:
            end = row.start + len(row.token_ids)
            following.append(
                row._replace(
                    token_ids=samples[0].token_ids[end : end + 1],  # a placeholder in flight
                    start=end,
                    samples=samples,
                    first_new_block=len(row.block_ids),
                )
            )
    return following


def _received(launched: _Pass, drafts: dict[int, list[int]], started_s: float) -> DraftPass:
    """Wait for a pass, and add its tokens to the drafts and to the texts that samples read."""
    tokens = launched.tokens.wait()
    drawn = iter(tokens)
    for row in launched.rows:
        for sample in row.samples:
            token_id = next(drawn)
            sample.token_ids[sample.position] = token_id  # in place, as later samples read the list
            drafts[row.seq_id].append(token_id)
    return DraftPass(
        sum(len(row.token_ids) for row in launched.rows),
        sum(len(row.samples) for row in launched.rows),
        time.perf_counter() - started_s,
    )


def _masked(
    rows: list[ScheduledSequence], drafts: Mapping[int, list[int]], guide: DraftGuide | None
) -> tuple[list[ScheduledSequence], TokenMasks | None]:
    """Return the rows that may have another draft, and the masks of these drafts.

    A row that only catches up, and samples no draft, stays.
    """
    if guide is None:
        return rows, None
    kept: list[ScheduledSequence] = []
    indices: list[int] = []
    masks: list[bytes] = []
    for row in rows:
        mask = guide.mask(row.seq_id, drafts[row.seq_id]) if row.samples else None
        if mask == b"":
            continue
        if mask is not None:
            indices.append(sum(len(other.samples) for other in kept))
            masks.append(mask)
        kept.append(row)
    return kept, TokenMasks(indices, b"".join(masks)) if masks else None
