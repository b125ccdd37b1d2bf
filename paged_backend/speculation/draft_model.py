"""A drafter that lets the worker's draft model guess: it decides only how many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.scheduler_output import DrawnDrafts, SchedulerOutput
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.speculation.drafting_costs import NO_PLAN, DraftingCosts, DraftPlan
from paged_backend.values.options.speculation import SpeculativeConfig

_PRIOR = 0.7  # chance that a draft is right, before any was verified
# Weights of a new draft in the chance of its sequence, and in the one of all sequences.
_DECAY, _DECAY_OF_ALL = 1 / 8, 1 / 64
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


class _Newest(NamedTuple):
    """A step with drafts."""

    seconds: float
    num_sequences: int


@dataclass(slots=True)
class _Guessed:
    """A sequence, and the chance that the draft model guesses it right."""

    seq: Sequence
    chance: float  # that a draft is right if those before it were
    place: int = 0  # number of known tokens
    drafts: list[int] = field(default_factory=list)  # the newest drafts
    num_drafted: int = 0  # known tokens when there were drafts last; 0 if there never were
    is_tried: bool = False  # the newest draft was right, although it may not pay

    @property
    def lag(self) -> int:
        """Number of tokens that the draft model lacks, if it has found no prefix of the prompt."""
        return self.place - self.num_drafted

    @property
    def room(self) -> int:
        """Number of tokens that a step may draft."""
        return self.seq.max_num_tokens - self.place - 1


class ModelDrafter(Drafter):
    """See :class:`~paged_backend.core.drafter.Drafter`. All drafts are placeholders.

    Steps without drafts are measured first, and then again in a while. From their time, from the
    time of drafts and from the chances, :class:`DraftingCosts` plans how many drafts pay. If the
    draft model lacks many tokens of a sequence, it has drafts only if they save more time than it
    takes to compute these tokens.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._num_tokens = config.num_speculative_tokens
        self._chance = _PRIOR  # the same over all sequences
        self._guessed: dict[int, _Guessed] = {}  # by seq_id
        self._costs = DraftingCosts()
        self._drawn: DrawnDrafts | None = None  # what the newest step has drawn
        self._refresh_s = 0.0  # seconds of steps with drafts since a step without them counted
        self._num_plain = 0  # steps without drafts since the last plan
        self._num_steps_to_rest = 0  # before the next plan
        self._was_plain = False  # the newest step had no drafts
        self._saved_s = 0.0  # seconds that drafts may cost, and those that they have saved
        self._newest: _Newest | None = None  # the newest step, if it had drafts

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return no sequences: a device with a draft model computes one step at a time."""
        return set()

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        """Return as many placeholders as pay; see the class."""
        self._drawn = None
        self._num_steps_to_rest -= 1
        if self._num_steps_to_rest > 0:
            return {}
        decodes = list(sequences)
        self._settle()
        self._forget()
        guessed = [self._of(seq) for seq in decodes if seq.request.speculate]
        for item in guessed:
            self._learn(item)
        numbers = self._numbers(guessed, len(decodes), budget)
        for item in guessed:
            if item.seq.seq_id in numbers:
                item.num_drafted = item.place
        return {seq_id: Draft([PLACEHOLDER] * number) for seq_id, number in numbers.items()}

    def take_drafts(self, drawn: DrawnDrafts) -> None:
        """Keep the drafts until the tokens at their positions are known."""
        self._drawn = drawn
        for seq_id, token_ids in drawn.token_ids.items():
            self._guessed[seq_id].drafts = token_ids

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """Record the duration of a step, unless it computed parts of prompts."""
        was_plain, self._was_plain = self._was_plain, False
        if any(len(item.draft_token_ids) + 1 != item.num_tokens for item in output.slices):
            return
        num_sequences = output.num_sequences
        if self._drawn is None:
            self._was_plain = True
            if was_plain:
                self._refresh_s = 0.0
                self._costs.observe_plain(seconds, num_sequences)
            self._num_plain += 1
            return
        self._refresh_s += seconds
        counted_s = self._costs.observe_drafted(seconds, num_sequences, self._drawn)
        if counted_s is not None:
            self._newest = _Newest(counted_s, num_sequences)

    def _numbers(
        self, guessed: list[_Guessed], num_sequences: int, budget: int
    ) -> Mapping[int, int]:
        """Return the numbers of drafts by ``seq_id``, without zeros."""
        items = {item.seq.seq_id: item for item in guessed if min(self._num_tokens, item.room) > 0}
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
                numbers[trial.seq.seq_id] = 1
        if items and not numbers:
            self._num_steps_to_rest = _REST
        return numbers

    def _plan(self, items: Mapping[int, _Guessed], num_sequences: int, budget: int) -> DraftPlan:
        """Return the best numbers of drafts for sequences that are worth their beginning."""
        chances = {
            seq_id: (item.chance, min(self._num_tokens, item.room))
            for seq_id, item in items.items()
        }
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

    def _is_worth_beginning(self, item: _Guessed, plan: DraftPlan) -> bool:
        """Return True if drafts save more time than the tokens take that the draft model lacks."""
        if item.lag <= _MAX_LAG:
            return True
        if self._saved_s < 0:
            return False
        seq_id = item.seq.seq_id
        num_steps = min(item.room, _HORIZON) / plan.num_tokens[seq_id]
        return plan.saved_s[seq_id] * num_steps > self._costs.catch_up_s(item.lag)

    def _trial(self, items: list[_Guessed], num_sequences: int, budget: int) -> _Guessed | None:
        """Return a sequence without drafts that has one all the same; None for no trial now.

        It is the one that had none for longest, of those for which the saved time suffices.
        """
        for item in items:
            if item.is_tried:
                chances = {item.seq.seq_id: (_LIKELY, min(self._num_tokens, item.room))}
                if self._costs.plan(chances, num_sequences, budget).numbers:
                    return item
        if self._saved_s >= _MAX_SAVED * self._costs.plain_s(num_sequences):
            return min(items, key=lambda item: item.lag)  # even if it seems to take longer
        affordable = [item for item in items if self._costs.trial_s(item.lag) < self._saved_s]
        return max(affordable, key=lambda item: item.lag, default=None)

    def _settle(self) -> None:
        """Compare the time of the newest step with the time of as many tokens without drafts."""
        if self._newest is None:
            return
        seconds, num_sequences = self._newest
        self._newest = None
        gains = [item.seq.num_known_tokens - item.place for item in self._guessed.values()]
        num_others = num_sequences - sum(gain > 0 for gain in gains)  # a token each
        plain_s = self._costs.plain_s(num_sequences)
        saved_s = plain_s * (sum(gains) + num_others) / num_sequences - seconds
        self._save(saved_s, plain_s)

    def _save(self, seconds: float, plain_s: float) -> None:
        saved_s = self._saved_s + seconds
        self._saved_s = max(-_MAX_DEBT * plain_s, min(saved_s, _MAX_SAVED * plain_s))

    def _of(self, seq: Sequence) -> _Guessed:
        found = self._guessed.get(seq.seq_id)
        if found is None:
            found = self._guessed[seq.seq_id] = _Guessed(seq, self._chance)
        return found

    def _learn(self, item: _Guessed) -> None:
        """Compare the newest drafts of a sequence with the tokens that have become known since."""
        known = item.seq.num_known_tokens
        following = item.seq.token_ids[item.place : known]
        for draft, token_id in zip(item.drafts, following, strict=False):
            is_right = draft == token_id
            item.chance += _DECAY * (is_right - item.chance)
            self._chance += _DECAY_OF_ALL * (is_right - self._chance)
            item.is_tried = is_right
            if not is_right:
                break
        item.place, item.drafts = known, []

    def _forget(self) -> None:
        """Forget the sequences that have ended or were preempted."""
        guessed = self._guessed.items()
        self._guessed = {
            seq_id: item for seq_id, item in guessed if item.seq.status is SequenceStatus.RUNNING
        }
