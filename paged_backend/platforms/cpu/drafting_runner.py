"""A model runner with a draft model, which guesses the next tokens before each step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paged_backend.core.scheduled_batch import ScheduledBatch, ScheduledSequence
from paged_backend.core.scheduler_output import (
    DraftGuide,
    DraftPass,
    DrawnDrafts,
    LaunchedStep,
    PendingOutput,
    TokenMasks,
)
from paged_backend.platforms.base import ModelRunner
from paged_backend.platforms.cpu.drafted_slots import DraftedSlots
from paged_backend.platforms.cpu.model_runner import CpuModelRunner
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


class DraftingRunner:
    """Draws the drafts of a step with a draft model, and lets the model compute the step.

    A draft is drawn like a token: from the logits of the draft model with the parameters, the seed
    and the position of the token. The draft model computes a sequence only when drafts are drawn
    for it, and first all tokens that it lacks. If these are too many for one step, the sequence
    has no drafts in this step.

    Args:
        main: runs the model.
        draft: runs the draft model, with a pool of as many blocks.
        slots: counts the tokens that the draft model has computed.
        max_num_tokens: number of tokens that the draft model computes at once.
    """

    def __init__(
        self,
        main: CpuModelRunner,
        draft: CpuModelRunner,
        slots: DraftedSlots,
        max_num_tokens: int,
    ) -> None:
        self.main = main
        self._draft = draft
        self._slots = slots
        self._max_num_tokens = max_num_tokens

    @property
    def model_seconds(self) -> float:
        """Seconds spent in forward passes so far, of both models."""
        return self.main.model_seconds + self._draft.model_seconds

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        return self.main.attention_backend

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return self.main.num_graphs + self._draft.num_graphs

    def launch(self, scheduled_batch: ScheduledBatch) -> DraftedStep:
        """Draw the drafts of a step, and compute its hidden states and logits."""
        if scheduled_batch.block_copies:
            self._draft.copy_blocks(scheduled_batch.block_copies)
            self._slots.copy(scheduled_batch.block_copies)
        self._slots.overwrite(scheduled_batch)
        waiting = {item.seq_id: item for item in scheduled_batch.scheduled if item.draws_drafts}
        if not waiting:
            return DraftedStep(self.main.launch(scheduled_batch), None)
        drawn = self._draw(waiting, scheduled_batch.guide)
        return DraftedStep(self.main.launch(scheduled_batch.with_drafts(drawn.token_ids)), drawn)

    def _draw(
        self, waiting: Mapping[int, ScheduledSequence], guide: DraftGuide | None
    ) -> DrawnDrafts:
        """Return the drafts of sequences, and the passes that draw one token of each."""
        drafts: dict[int, list[int]] = {seq_id: [] for seq_id in waiting}
        passes: list[DraftPass] = []
        started_s = time.perf_counter()
        rows, masks = _masked(self._first_rows(waiting.values()), drafts, guide)
        while rows:
            tokens = self._draft.draw(ScheduledBatch.of(rows), masks)
            drawn = iter(tokens)
            following: list[ScheduledSequence] = []
            for row in rows:
                end = row.start + len(row.token_ids)
                self._slots.add(row.block_ids, row.start, end)
                for sample in row.samples:
                    token_id, item = next(drawn), waiting[row.seq_id]
                    # In place, because later samples read the list.
                    sample.token_ids[end] = token_id
                    drafts[row.seq_id].append(token_id)
                    number = len(drafts[row.seq_id])
                    if number < item.num_draft_tokens:
                        samples = item.samples[number : number + 1]
                        following.append(
                            row._replace(token_ids=[token_id], start=end, samples=samples)
                        )
            now = time.perf_counter()
            num_tokens = sum(len(row.token_ids) for row in rows)
            passes.append(DraftPass(num_tokens, len(tokens), now - started_s))
            rows, masks = _masked(following, drafts, guide)
            started_s = time.perf_counter()
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
                rows.append(ScheduledSequence(item.seq_id, token_ids, start, table, samples))
        return rows


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


def drafting_runner(main: ModelRunner, draft: ModelRunner, layout: KVCacheLayout) -> DraftingRunner:
    """See `DraftingRunnerFactory`."""
    assert isinstance(main, CpuModelRunner) and isinstance(draft, CpuModelRunner)
    slots = DraftedSlots(layout, layout.windows.index(None))
    return DraftingRunner(main, draft, slots, layout.max_num_batched_tokens)
