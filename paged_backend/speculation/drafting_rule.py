"""Decides how many tokens a draft model guesses: as many as give more tokens per second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paged_backend.core.scheduler_output import DrawnDrafts
from paged_backend.speculation.drafting_costs import NO_PLAN, DraftingCosts, DraftPlan

# The share of all time that drafts may cost if they do not pay. It is spent on sequences that have
# no drafts, because their texts may have become easier to guess, and on errors in the plan.
_SHARE = 1 / 50
_MAX_SAVED, _MAX_DEBT = 10, 40  # steps without drafts
_LIKELY = 0.95  # a sequence with right drafts is tried again if drafts of this chance would pay
# A step without drafts is measured again after the time of this many such steps. Only the second of
# two in a row counts, because drafts leave other numbers in the caches.
_REFRESH = 100
_REST = 16  # steps without a plan if drafts did not pay, because a plan takes time, too
_HORIZON = 256  # tokens for which a sequence is assumed to go on at most
_MAX_LAG = 4  # tokens that the draft model may lack of a sequence that has drafts in most steps


class Candidate(NamedTuple):
    """A sequence that can have drafts."""

    seq_id: int
    chance: float  # that a draft is right if those before it were
    lag: int  # number of tokens that the draft model lacks, if it has found no prefix
    room: int  # number of tokens that the sequence can still have after the next one
    max_drafts: int  # number of drafts at most, from 1 to `room`
    is_tried: bool  # the newest draft was right, although it may not pay


class DraftingRule(ABC):
    """Chooses the numbers of drafts of a step. Only `numbers` has to be there."""

    def is_resting(self) -> bool:
        """Return True if no plan is made for this step, which is called once for each step."""
        return False

    def settle(self, gains: Sequence[int]) -> None:
        """Take note of the tokens that each drafted sequence has got from the newest plan."""
        del gains

    @abstractmethod
    def numbers(
        self, candidates: Sequence[Candidate], num_sequences: int, budget: int
    ) -> Mapping[int, int]:
        """Return the numbers of drafts by ``seq_id``, without zeros.

        Args:
            candidates: the sequences that can have drafts.
            num_sequences: number of sequences that the step decodes.
            budget: number of drafts that fit in the step.
        """

    def observe(self, seconds: float, num_sequences: int, drawn: DrawnDrafts | None) -> None:
        """Take note of a step of decodes and drafts.

        Args:
            seconds: the whole time of the step.
            num_sequences: number of sequences that the step has decoded.
            drawn: what the draft model has done; None if the step had no drafts.
        """
        del seconds, num_sequences, drawn

    def skip(self) -> None:
        """Take note of a step that has computed parts of prompts, and tells nothing about times."""
        return


class _Newest(NamedTuple):
    """A step with drafts."""

    seconds: float
    num_sequences: int


class PayingDrafts(DraftingRule):
    """Has drafts only where they give more tokens per second than steps without drafts do.

    Steps without drafts are measured first, and then again in a while. From their time, from the
    time of drafts and from the chances, :class:`DraftingCosts` plans how many drafts pay. If the
    draft model lacks many tokens of a sequence, it has drafts only if they save more time than it
    takes to compute these tokens.
    """

    def __init__(self) -> None:
        self._costs = DraftingCosts()
        self._refresh_s = 0.0  # seconds of steps with drafts since a step without them counted
        self._num_plain = 0  # steps without drafts since the last plan
        self._num_steps_to_rest = 0  # before the next plan
        self._was_plain = False  # the newest step had no drafts
        self._saved_s = 0.0  # seconds that drafts may cost, and those that they have saved
        self._newest: _Newest | None = None  # the newest step, if it had drafts

    def is_resting(self) -> bool:
        """Return True for some steps after a plan without drafts."""
        self._num_steps_to_rest -= 1
        return self._num_steps_to_rest > 0

    def settle(self, gains: Sequence[int]) -> None:
        """Compare the time of the newest step with the time of as many tokens without drafts."""
        if self._newest is None:
            return
        seconds, num_sequences = self._newest
        self._newest = None
        num_others = num_sequences - sum(gain > 0 for gain in gains)  # a token each
        plain_s = self._costs.plain_s(num_sequences)
        saved_s = plain_s * (sum(gains) + num_others) / num_sequences - seconds
        self._save(saved_s, plain_s)

    def numbers(
        self, candidates: Sequence[Candidate], num_sequences: int, budget: int
    ) -> Mapping[int, int]:
        """See :class:`DraftingRule`."""
        items = {item.seq_id: item for item in candidates}
        plain_s = self._costs.plain_s(num_sequences)
        self._save(self._num_plain * _SHARE * plain_s, plain_s)
        self._num_plain = 0
        limit_s = _REFRESH * plain_s
        is_measured = self._costs.knows_plain(num_sequences) and self._refresh_s < limit_s
        if budget <= 0 or not is_measured:
            return {}
        numbers = dict(self._plan(items, num_sequences, budget).numbers)
        others = [item for seq_id, item in items.items() if seq_id not in numbers]
        if others and sum(numbers.values()) < budget:
            trial = self._trial(others, num_sequences, budget)
            if trial is not None:
                numbers[trial.seq_id] = 1
        if items and not numbers:
            self._num_steps_to_rest = _REST
        return numbers

    def observe(self, seconds: float, num_sequences: int, drawn: DrawnDrafts | None) -> None:
        """Record the duration of a step."""
        was_plain, self._was_plain = self._was_plain, drawn is None
        if drawn is None:
            if was_plain:
                self._refresh_s = 0.0
                self._costs.observe_plain(seconds, num_sequences)
            self._num_plain += 1
            return
        self._refresh_s += seconds
        counted_s = self._costs.observe_drafted(seconds, num_sequences, drawn)
        if counted_s is not None:
            self._newest = _Newest(counted_s, num_sequences)

    def skip(self) -> None:
        """See :class:`DraftingRule`."""
        self._was_plain = False

    def _plan(self, items: Mapping[int, Candidate], num_sequences: int, budget: int) -> DraftPlan:
        """Return the best numbers of drafts for sequences that are worth their beginning."""
        chances = {seq_id: (item.chance, item.max_drafts) for seq_id, item in items.items()}
        plan = self._costs.plan(chances, num_sequences, budget)
        late = {
            seq_id for seq_id in plan.numbers if not self._is_worth_beginning(items[seq_id], plan)
        }
        if not late:
            return plan
        # The others must pay for the passes alone.
        chances = {
            seq_id: value
            for seq_id, value in chances.items()
            if seq_id in plan.numbers and seq_id not in late
        }
        return self._costs.plan(chances, num_sequences, budget) if chances else NO_PLAN

    def _is_worth_beginning(self, item: Candidate, plan: DraftPlan) -> bool:
        """Return True if drafts save more time than the tokens take that the draft model lacks."""
        if item.lag <= _MAX_LAG:
            return True
        if self._saved_s < 0:
            return False
        num_steps = min(item.room, _HORIZON) / plan.num_tokens[item.seq_id]
        return plan.saved_s[item.seq_id] * num_steps > self._costs.catch_up_s(item.lag)

    def _trial(self, items: list[Candidate], num_sequences: int, budget: int) -> Candidate | None:
        """Return a sequence without drafts that has one all the same; None for no trial now.

        It is the one that had none for longest, of those for which the saved time suffices.
        """
        for item in items:
            if item.is_tried:
                chances = {item.seq_id: (_LIKELY, item.max_drafts)}
                if self._costs.plan(chances, num_sequences, budget).numbers:
                    return item
        if self._saved_s >= _MAX_SAVED * self._costs.plain_s(num_sequences):
            return min(items, key=lambda item: item.lag)  # even if it seems to take longer
        affordable = [item for item in items if self._costs.trial_s(item.lag) < self._saved_s]
        return max(affordable, key=lambda item: item.lag, default=None)

    def _save(self, seconds: float, plain_s: float) -> None:
        saved_s = self._saved_s + seconds
        self._saved_s = max(-_MAX_DEBT * plain_s, min(saved_s, _MAX_SAVED * plain_s))
