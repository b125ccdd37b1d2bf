"""A drafter that lets the worker's draft model guess: it decides only how many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.speculation.acceptance import numbers_of_drafts
from paged_backend.speculation.step_costs import StepCosts
from paged_backend.values.options.speculation import SpeculativeConfig

_PRIOR = 0.7  # chance that a draft is right, before any was verified
# Weights of a new draft in the chance of its sequence, and in the one of all sequences.
_DECAY, _DECAY_OF_ALL = 1 / 8, 1 / 64
# After these numbers of steps, a sequence has a draft even if it does not pay, because its text may
# have become easier to guess. The number doubles while such drafts are wrong.
_FIRST_PAUSE, _MAX_PAUSE = 16, 128


@dataclass(slots=True)
class _Guessed:
    """A sequence, and the chance that the draft model guesses it right."""

    seq: Sequence
    chance: float  # that a draft is right if those before it were
    place: int = 0  # number of tokens of the sequence before the newest drafts
    drafts: list[int] = field(default_factory=list)  # the newest drafts
    num_steps_without: int = _MAX_PAUSE  # steps since the newest drafts
    pause: int = _FIRST_PAUSE  # steps before a draft that may not pay


class ModelDrafter(Drafter):
    """See :class:`~paged_backend.core.drafter.Drafter`. All drafts are placeholders."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._num_tokens = config.num_speculative_tokens
        self._chance = _PRIOR  # the same over all sequences
        self._guessed: dict[int, _Guessed] = {}  # by seq_id
        self._costs = StepCosts()
        self._catches_up = False  # the draft model computes earlier tokens in the scheduled step

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """Record the duration of a step, unless it computed more than decodes and their drafts."""
        if self._catches_up:
            return
        if all(len(item.draft_token_ids) + 1 == item.num_tokens for item in output.slices):
            self._costs.observe(seconds, output.num_tokens)

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return no sequences: a device with a draft model computes one step at a time."""
        return set()

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        """Return as many placeholders as pay; see the class."""
        decodes = list(sequences)
        self._forget()
        guessed = [self._of(seq) for seq in decodes if seq.request.speculate]
        for item in guessed:
            self._learn(item)
        chances = {
            item.seq.seq_id: (item.chance, number)
            for item in guessed
            if (number := min(self._num_tokens, item.seq.max_num_tokens - item.place - 1)) > 0
        }
        numbers = numbers_of_drafts(chances, len(decodes), budget, self._costs)
        self._catches_up = False
        for item in guessed:
            seq_id = item.seq.seq_id
            if seq_id not in numbers and seq_id in chances and item.num_steps_without >= item.pause:
                numbers[seq_id] = 1
            if seq_id in numbers:
                self._catches_up = self._catches_up or item.num_steps_without > 0
                item.num_steps_without = 0
            else:
                item.num_steps_without += 1
        return {seq_id: Draft([PLACEHOLDER] * number) for seq_id, number in numbers.items()}

    def take_drafts(self, drafts: Mapping[int, list[int]]) -> None:
        """Keep the drafts until the tokens at their positions are known."""
        for seq_id, token_ids in drafts.items():
            self._guessed[seq_id].drafts = token_ids

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
            item.pause = 1 if is_right else min(2 * item.pause, _MAX_PAUSE)
            if not is_right:
                break
        item.place, item.drafts = known, []

    def _forget(self) -> None:
        """Forget the sequences that have ended or were preempted."""
        guessed = self._guessed.items()
        self._guessed = {
            seq_id: item for seq_id, item in guessed if item.seq.status is SequenceStatus.RUNNING
        }
