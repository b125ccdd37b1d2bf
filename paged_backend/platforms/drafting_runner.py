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
    ModelRunnerOutput,
    PendingOutput,
    TokenMasks,
)
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.models.hidden_states import HiddenStates
from paged_backend.platforms.base import ChainingRunner, DraftRunner, ModelRunner, PendingTokens
from paged_backend.platforms.drafted_slots import DraftedSlots
from paged_backend.values.kv_cache_groups import KVCacheLayout


class _Pass(NamedTuple):
    """A pass of the draft model that may still be computed."""

    rows: list[ScheduledSequence]
    number: int  # drafts of each sequence before those of the pass
    tokens: PendingTokens

    def timed(self, seconds: float) -> DraftPass:
        """Return what the costs of drafts depend on."""
        num_tokens = sum(len(row.token_ids) for row in self.rows)
        return DraftPass(num_tokens, sum(len(row.samples) for row in self.rows), seconds)


@dataclass(slots=True)
class _Earlier:
    """What the last passes for a sequence have left."""

    num_tokens: int  # first tokens with keys and values, which later steps do not write again
    num_blocks: int  # first entries of its block table that the draft runner has


@dataclass(frozen=True, slots=True)
class DraftedOutput:
    """The output of a step and of the passes before it; see PendingOutput."""

    pending: PendingOutput
    passes: list[_Pass]  # in their order
    drawn: DrawnDrafts

    def result(self) -> ModelRunnerOutput:
        """Wait for the device, and complete what the draft model has drawn."""
        for launched in self.passes:
            _receive(launched, self.drawn)
            self.drawn.passes.append(launched.timed(launched.tokens.seconds))
        return self.pending.result()


@dataclass(frozen=True, slots=True)
class DraftedStep(LaunchedStep):
    """A step with the drafts that the worker has drawn for it; see LaunchedStep."""

    launched: LaunchedStep
    drawn: DrawnDrafts | None
    passes: list[_Pass]  # passes in flight

    def drawn_drafts(self) -> DrawnDrafts | None:
        """Return what the draft model has drawn; None if the step needed no drafts of it."""
        return self.drawn

    def greedy_token_ids(self) -> Mapping[int, int]:
        """Return the tokens that only a mask can change."""
        return self.launched.greedy_token_ids()

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        """Sample the tokens of the step."""
        pending = self.launched.sample(masks)
        if self.drawn is None or not self.passes:
            return pending
        return DraftedOutput(pending, self.passes, self.drawn)


class DraftingRunner:
    """Draws the drafts of a step with a draft model, and lets the model compute the step.

    A draft is drawn like a token: from the logits of the draft model with the parameters, the seed
    and the position of the token. The draft model computes a sequence only when drafts are drawn
    for it, and first all tokens that it lacks. If these are too many for one step, the sequence
    has no drafts in this step.

    A device that knows tokens before the host does gets all passes and the step at once, also while
    the step before them is in flight. Where a sequence has drafts in that step, the device moves
    its rows back by the number of wrong ones, as it does with its slices. The draft model then
    computes the same number of tokens for any number of wrong ones, some of them once more.

    But the host waits for each pass if masks, or bad words of several tokens, depend on its tokens.

    Args:
        main: runs the model.
        draft: runs the draft model, with a pool of as many blocks.
        layout: the groups of the block tables. The draft model uses the tables of the first group
            without a window.
        hidden: hidden states of the model. With them, the row of a token reads the state of this
            token, and has the next token as its input. None if the draft model reads none.

    Attributes:
        main, draft: see the arguments.
    """

    def __init__(
        self,
        main: ModelRunner,
        draft: DraftRunner,
        layout: KVCacheLayout,
        hidden: HiddenStates | None = None,
    ) -> None:
        self.main = main
        self.draft = draft
        self._hidden = hidden
        self._lead = 0 if hidden is None else 1  # see ScheduledBatch
        self._chaining = draft if isinstance(draft, ChainingRunner) else None
        self._slots = DraftedSlots(layout, layout.windows.index(None))
        self._num_groups = layout.num_groups
        self._max_num_tokens = layout.max_num_batched_tokens  # that the draft model computes
        self._block_size = layout.block_size
        self._earlier: dict[int, _Earlier] = {}  # by seq_id

    @property
    def model_seconds(self) -> float | None:
        """Seconds in forward passes of both models; None if the host does not wait for them."""
        main, draft = self.main.model_seconds, self.draft.model_seconds
        return None if main is None or draft is None else main + draft

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        return self.main.attention_backend

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return self.main.num_graphs + self.draft.num_graphs

    def launch(self, scheduled_batch: ScheduledBatch) -> DraftedStep:
        """Draw the drafts of a step, and start the computation of its hidden states and logits."""
        self._note(scheduled_batch)
        waiting = {item.seq_id: item for item in scheduled_batch.scheduled if item.draws_drafts}
        if not waiting:
            return DraftedStep(self.main.launch(scheduled_batch), None, [])
        drawn, passes = self._draw(waiting, scheduled_batch.guide)
        launched = self.main.launch(scheduled_batch.with_drafts(drawn.token_ids))
        return DraftedStep(launched, drawn, passes)

    def _note(self, batch: ScheduledBatch) -> None:
        """Take note of what a step changes in the blocks of sequences."""
        self.draft.release(batch.freed_seq_ids)
        for seq_id in batch.freed_seq_ids:
            self._earlier.pop(seq_id, None)
        if batch.block_copies:
            self.draft.copy_blocks(batch.block_copies)
            if self._hidden is not None:
                self._hidden.copy_blocks(batch.block_copies)
            self._slots.copy(batch.block_copies)
        for item in batch.scheduled:
            earlier = self._earlier.get(item.seq_id)
            if earlier is not None:
                first = item.first_new_block // self._num_groups
                earlier.num_blocks = min(earlier.num_blocks, first)
        self._slots.overwrite(batch)

    def _draw(
        self, waiting: Mapping[int, ScheduledSequence], guide: DraftGuide | None
    ) -> tuple[DrawnDrafts, list[_Pass]]:
        """Launch passes that draw one token of each sequence.

        Returns:
            The drafts, and the passes in flight, without which some drafts are placeholders.
        """
        drawn = DrawnDrafts({seq_id: [] for seq_id in waiting}, [])
        in_flight: list[_Pass] = []
        waits = guide is not None or any(map(_needs_tokens, waiting.values()))
        chaining = None if waits else self._chaining
        number, started_s = 0, time.perf_counter()
        rows, masks = _masked(self._first_rows(waiting.values()), drawn.token_ids, guide)
        while rows:
            tokens = self._launch(rows, masks, number)
            launched = _Pass(rows, number, tokens)
            # The rows of later passes read guessed hidden states, so they are computed again.
            for row in rows if self._hidden is None or number == 0 else ():
                first = row.start - row.max_move  # or later
                self._slots.add(row.block_ids, first, first + len(row.token_ids))
            if chaining is None:
                _receive(launched, drawn)
                _tell_samples(launched, drawn)
                now_s = time.perf_counter()
                # The host waits for earlier steps of a device, too. Without one, it computes masks.
                seconds = now_s - started_s if self._chaining is None else tokens.seconds
                drawn.passes.append(launched.timed(seconds))
                started_s = now_s
            else:
                in_flight.append(launched)
                if sampled := [row.seq_id for row in rows if row.samples]:
                    chaining.give_drafts(self.main, sampled, number)
                for seq_id in sampled:
                    drawn.token_ids[seq_id].append(PLACEHOLDER)
            number += 1
            following = _next_rows(rows, waiting, number, self._lead)
            rows, masks = _masked(following, drawn.token_ids, guide)
        return drawn, in_flight

    def _launch(
        self, rows: list[ScheduledSequence], masks: TokenMasks | None, number: int
    ) -> PendingTokens:
        """Launch a pass of the draft model; `number` drafts of each sequence are there."""
        batch = ScheduledBatch.of(rows, self._lead)
        if number == 0 and self._chaining is not None:
            self._chaining.follow(self.main, batch)
        if self._hidden is None:
            return self.draft.draw(batch, masks)
        # A row without samples is followed by tokens that the draft model computes later. They have
        # hidden states of the model, which the result of the row must not replace.
        size, slots = self._block_size, []
        for row in rows:
            block, offset = divmod(row.start + len(row.token_ids), size)
            if not row.samples:
                slots.append(row.block_ids[block] * size + offset)
        with self._hidden.protected(slots):
            return self.draft.draw(batch, masks)

    def _first_rows(self, waiting: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
        """Return the tokens that the draft model lacks, as many as it can compute at once.

        A sequence with all of its tokens samples its first draft.
        """
        rows: list[ScheduledSequence] = []
        room, lead = self._max_num_tokens, self._lead
        for item in waiting:
            table = self._slots.table(item.block_ids)
            end = item.samples[0].position - lead
            earlier = self._earlier.get(item.seq_id, _Earlier(0, 0))
            start = self._first_token(item, table, end, earlier)
            stop = min(end, start + room)
            if item.max_move and stop < end or start < item.max_move:
                continue  # which tokens there are is not known
            room -= stop - start
            if stop > start:
                samples = item.samples[:1] if stop == end else ()
                token_ids = item.samples[0].token_ids[start + lead : stop + lead]
                num_tokens = min(stop, item.start) - item.max_move
                self._earlier[item.seq_id] = _Earlier(num_tokens, len(table))
                rows.append(
                    ScheduledSequence(
                        *(item.seq_id, token_ids, start, table, samples),
                        first_new_block=earlier.num_blocks,
                        max_move=item.max_move,
                    )
                )
        return sorted(rows, key=lambda row: len(row.token_ids) > 1)  # decodes come first

    def _first_token(
        self, item: ScheduledSequence, table: list[int], end: int, earlier: _Earlier
    ) -> int:
        """Return the position of the first token that the draft model computes for a sequence.

        Args:
            item: the slice of the sequence.
            table: its block table.
            end: the position after the token that the first draft follows.
            earlier: what the last passes have left.
        """
        if item.max_move:
            # The step in flight has drafts. Drafts that were not drawn do not count, so the draft
            # model has computed all tokens before them. If all are right, it lacks the last one. An
            # MTP layer has computed them from guessed hidden states, so it computes as many tokens
            # as may be right.
            return end - (2 if self._hidden is None else item.max_move + 1)
        num_known = min(earlier.num_tokens, earlier.num_blocks * self._block_size)
        return self._slots.number(table, item.start, num_known)


def _next_rows(
    rows: list[ScheduledSequence],
    waiting: Mapping[int, ScheduledSequence],
    number: int,
    lead: int,
) -> list[ScheduledSequence]:
    """Return the rows of the next pass.

    Args:
        rows: the rows of a pass, which samples a draft of each row with samples.
        waiting: the sequences with drafts, by ``seq_id``.
        number: number of drafts that each of these rows has after the pass.
        lead: see ScheduledBatch.
    """
    following: list[ScheduledSequence] = []
    for row in rows:
        samples = waiting[row.seq_id].samples[number : number + 1]
        # The last sample of a sequence follows its last draft, and is not a draft.
        if row.samples and number < waiting[row.seq_id].num_draft_tokens:
            end = row.start + len(row.token_ids)
            following.append(
                row._replace(
                    # A placeholder in flight.
                    token_ids=samples[0].token_ids[end + lead : end + lead + 1],
                    start=end,
                    samples=samples,
                    first_new_block=len(row.block_ids),
                )
            )
    return following


def _needs_tokens(item: ScheduledSequence) -> bool:
    """Return True if the host reads the tokens before a sample, to change its logits."""
    return item.samples[0].params.reads_tokens


def _receive(launched: _Pass, drawn: DrawnDrafts) -> None:
    """Wait for a pass, and set the drafts that it has drawn."""
    sampled = [row.seq_id for row in launched.rows if row.samples]
    for seq_id, token_id in zip(sampled, launched.tokens.wait(), strict=False):
        drawn.token_ids[seq_id][launched.number : launched.number + 1] = [token_id]


def _tell_samples(launched: _Pass, drawn: DrawnDrafts) -> None:
    """Put the drafts of a pass into the texts that later samples read."""
    for row in launched.rows:
        for sample in row.samples:
            sample.token_ids[sample.position] = drawn.token_ids[row.seq_id][launched.number]


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
