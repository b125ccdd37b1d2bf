"""A drafter that lets the worker's draft model guess: it decides only how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.scheduler_output import DrawnDrafts, SchedulerOutput
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.speculation.drafting_rule import Candidate, DraftingRule, PayingDrafts
from paged_backend.values.options.speculation import SpeculativeConfig

_PRIOR = 0.7  # chance that a draft is right, before any was verified
# Weights of a new draft in the chance of its sequence, and in the one of all sequences.
_DECAY, _DECAY_OF_ALL = 1 / 8, 1 / 64


@dataclass(slots=True)
class _Guessed:
    """A sequence, and the chance that the draft model guesses it right."""

    seq: Sequence
    chance: float  # that a draft is right if those before it were
    num_drafted: int = 0  # known tokens when there were drafts last; 0 if there never were
    is_tried: bool = False  # the newest draft was right, although it may not pay

    def candidate(self, most: int) -> Candidate:
        """Return what a rule needs to know; `most` drafts are allowed."""
        seq = self.seq
        room = seq.max_num_tokens - seq.num_tokens - 1
        lag = seq.num_known_tokens - self.num_drafted
        return Candidate(seq.seq_id, self.chance, lag, room, min(most, room), self.is_tried)


class _Returned(NamedTuple):
    """The drafts of a sequence in the step that returned last."""

    item: _Guessed
    drafts: list[int]
    num_known: int  # number of known tokens before those of the step


class ModelDrafter(Drafter):
    """See :class:`~paged_backend.core.drafter.Drafter`. All drafts are placeholders.

    Args:
        config: the largest number of drafts of a sequence.
        rule: decides how many drafts a step has; by default those that pay.
        draws_ahead: whether sequences with steps in flight can have drafts.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        rule: DraftingRule | None = None,
        *,
        draws_ahead: bool = False,
    ) -> None:
        self.draws_ahead = draws_ahead
        self._num_tokens = config.num_speculative_tokens
        self._rule = rule or PayingDrafts()
        self._chance = _PRIOR  # the same over all sequences
        self._guessed: dict[int, _Guessed] = {}  # by seq_id
        self._rests: bool | None = None  # the rule makes no plan for this step; None: not asked yet
        # What the draft model has done for the steps in flight that have drafts.
        self._drawn: deque[DrawnDrafts] = deque()
        self._returned: list[_Returned] = []  # nothing was learned from them yet

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return all sequences that may have drafts, if any of them should have drafts now."""
        ahead = list(sequences)
        self._learn()
        if not ahead or self._is_resting():
            return set()
        candidates = self._candidates(ahead)
        if not self._rule.numbers(candidates, len(ahead), self._num_tokens * len(ahead)):
            return set()
        return {seq.seq_id for seq in ahead if seq.request.speculate}

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        """Return as many placeholders as the rule says."""
        decodes = list(sequences)
        is_resting, self._rests = bool(decodes) and self._is_resting(), None
        if not decodes or is_resting:
            return {}
        self._learn()
        numbers = self._rule.numbers(self._candidates(decodes), len(decodes), budget)
        return {seq_id: Draft([PLACEHOLDER] * number) for seq_id, number in numbers.items()}

    def _is_resting(self) -> bool:
        """Ask the rule, once for each step."""
        if self._rests is None:
            self._rests = self._rule.is_resting()
        return self._rests

    def _candidates(self, decodes: list[Sequence]) -> list[Candidate]:
        """Return what the rule needs to know about the sequences that can have drafts."""
        guessed = [self._of(seq) for seq in decodes if seq.request.speculate]
        candidates = [item.candidate(self._num_tokens) for item in guessed]
        return [item for item in candidates if item.max_drafts > 0]

    def take_drafts(self, drawn: DrawnDrafts) -> None:
        """Keep the drafts until the step returns."""
        self._drawn.append(drawn)
        for seq_id, token_ids in drawn.token_ids.items():
            if token_ids:
                item = self._guessed[seq_id]
                item.num_drafted = item.seq.num_known_tokens

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """Record the drafts of a step that returns, and its duration without parts of prompts."""
        self._learn()
        has_drafts = any(item.draft_token_ids for item in output.slices)
        drawn = self._drawn.popleft() if has_drafts and self._drawn else None
        if drawn is not None:
            self._returned = [
                _Returned(item, token_ids, item.seq.num_known_tokens)
                for seq_id, token_ids in drawn.token_ids.items()
                if token_ids and (item := self._guessed.get(seq_id)) is not None
            ]
        if any(len(item.draft_token_ids) + 1 != item.num_tokens for item in output.slices):
            self._rule.skip()
        else:
            self._rule.observe(seconds, output.num_sequences, drawn)

    def _of(self, seq: Sequence) -> _Guessed:
        found = self._guessed.get(seq.seq_id)
        if found is None:
            found = self._guessed[seq.seq_id] = _Guessed(seq, self._chance)
        return found

    def _learn(self) -> None:
        """Learn from the step that returned last, as its tokens are known now."""
        returned, self._returned = self._returned, []
        gains = [item.seq.num_known_tokens - num_known for item, _, num_known in returned]
        self._rule.settle(gains)
        for item, drafts, num_known in returned:
            self._compare(item, drafts, item.seq.token_ids[num_known : item.seq.num_known_tokens])
            item.num_drafted = item.seq.num_known_tokens
        self._guessed = {
            seq_id: item
            for seq_id, item in self._guessed.items()
            if item.seq.status is SequenceStatus.RUNNING
        }

    def _compare(self, item: _Guessed, drafts: list[int], following: list[int]) -> None:
        """Compare the drafts of a sequence with the tokens that have become known."""
        for draft, token_id in zip(drafts, following, strict=False):
            is_right = draft == token_id
            item.chance += _DECAY * (is_right - item.chance)
            self._chance += _DECAY_OF_ALL * (is_right - self._chance)
            item.is_tried = is_right
            if not is_right:
                break
