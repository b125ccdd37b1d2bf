"""Decides which running sequences a step computes drafts for, and how many tokens these have."""

from __future__ import annotations

from collections.abc import Set

from paged_backend.core.constraints import allowed_drafts
from paged_backend.core.drafter import NO_DRAFT, Draft, Drafter
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import DrawnDrafts
from paged_backend.core.sequence import Sequence
from paged_backend.core.sequences import Sequences
from paged_backend.core.step import ScheduledStep
from paged_backend.core.stopping import (
    can_be_drafted,
    can_be_drafted_ahead,
    max_draft_tokens,
    may_await_token,
    may_go_ahead,
)


class Drafting:
    """Asks a drafter for drafts that fit a step, their sequences and their grammars.

    Args:
        config: the limits of a step.
        kv: the KV cache manager.
        sequences: the scheduler's sequences.
        drafter: guesses the next tokens of running sequences; None for no drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        sequences: Sequences,
        drafter: Drafter | None,
    ) -> None:
        self._config, self._kv, self._sequences = config, kv, sequences
        self._drafter = drafter
        self.draws_ahead = drafter is not None and config.draws_ahead
        # Whether the device looks for drafts in predictions; a draft model does not.
        self.sends_predictions = self.draws_ahead and not config.waits_together

    def awaiting(self) -> set[int]:
        """Return the sequences that wait for tokens in flight, so that they can be drafted for."""
        if self._drafter is None or self._budget() == 0:
            return set()
        running = self._sequences.running.values()
        waits_together, draws_ahead = self._config.waits_together, self._draws_ahead_now()
        if waits_together and draws_ahead:
            return set()
        awaiting = self._drafter.awaits(
            seq for seq in running if may_await_token(seq) or draws_ahead and may_go_ahead(seq)
        )
        if waits_together:
            if awaiting or any(seq.num_draft_tokens > 0 for seq in running):
                return {seq.seq_id for seq in running if seq.num_uncomputed_tokens == 1}
        return awaiting

    def drafts(self, awaiting: Set[int]) -> dict[int, Draft]:
        """Return drafts by ``seq_id``, as many as a step has room for beside all decodes.

        While prompts wait or are computed, they get at least half of this room.

        Args:
            awaiting: the sequences that wait for a token.
        """
        drafts: dict[int, Draft] = {}
        budget = self._budget()
        if self._drafter is None:
            return drafts
        draws_ahead = self._draws_ahead_now()
        decodes = [
            seq
            for seq in self._sequences.running.values()
            if seq.num_uncomputed_tokens == 1
            and (can_be_drafted(seq) or draws_ahead and may_go_ahead(seq))
            and seq.seq_id not in awaiting
        ]
        proposed = self._drafter.propose(decodes, budget)
        for seq in decodes:
            num_useful = min(budget, max_draft_tokens(seq))
            num_useful = self._kv.cut_chunk(seq, seq.num_computed_tokens, 1 + num_useful) - 1
            draft = proposed.get(seq.seq_id, NO_DRAFT).first(num_useful)
            draft = allowed_drafts(seq, draft)
            if draft.token_ids:
                drafts[seq.seq_id] = draft
                budget -= len(draft.token_ids)
        return drafts

    def may_follow_drafts(self, seq: Sequence) -> bool:
        """Return True if the next slice of a sequence may follow drafts in flight."""
        return self.draws_ahead and may_go_ahead(seq)

    def _draws_ahead_now(self) -> bool:
        """Return True if sequences with steps in flight may have drafts in this step."""
        if not self.draws_ahead or not self._config.waits_together:
            return self.draws_ahead
        return not any(map(_has_to_wait, self._sequences.running.values()))

    def _budget(self) -> int:
        """Return the number of drafts that the step has room for."""
        states, running = self._kv.states, self._sequences.running.values()
        if self._drafter is None or not (states is None or states.has_room_for_drafts):
            return 0
        room = self._config.max_num_batched_tokens - len(running)
        budget = max(0, min(room, self._config.max_num_drafts))
        if self._sequences.waiting or any(seq.num_uncomputed_tokens > 1 for seq in running):
            budget //= 2
        return budget

    def take(self, step: ScheduledStep, drawn: DrawnDrafts) -> None:
        """Take the drafts of the newest step that the worker has drawn, which may be too few."""
        if self._drafter is None:
            return
        for seq in step.sampled:
            token_ids = drawn.token_ids.get(seq.seq_id)
            if token_ids is not None:
                num_missing = len(step.drafts[seq.seq_id].token_ids) - len(token_ids)
                if num_missing:
                    self._drop(seq, num_missing)
                step.drafts[seq.seq_id] = Draft(token_ids)
        self._drafter.take_drafts(drawn)

    def _drop(self, seq: Sequence, number: int) -> None:
        """Forget drafts of the newest step that it has not got."""
        seq.drop_drafts(number)
        if self._kv.states is not None:
            self._kv.states.drop_drafts(seq, number)


def _has_to_wait(seq: Sequence) -> bool:
    """Return True if a sequence can have drafts of a draft model, but none after unknown tokens.

    Masks guide the draft model.
    """
    has_grammar = seq.grammar is not None
    return seq.request.speculate and (has_grammar or not can_be_drafted_ahead(seq))
