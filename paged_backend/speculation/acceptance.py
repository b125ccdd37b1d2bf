"""The rate of right guesses of a text, and the number of guesses that a step should verify."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from paged_backend.speculation.step_costs import StepCosts

DECAY, DECAY_OF_ALL = 1 / 16, 1 / 64
"""Weights of a new guess in the chances of its text, and in those of all texts."""


class Support(Enum):
    """The agreement of the earlier places that a guessed token comes from.

    The values are the chances that are assumed until guesses were verified, by the binary logarithm
    of the length of the match.
    """

    ONE = (0.3, 0.5, 0.7, 0.8, 0.9)  # there is only one place
    ALL = (0.6, 0.8, 0.85, 0.9, 0.95)
    MOST = (0.4, 0.4, 0.4, 0.4, 0.4)  # more than half of them go on with this token
    FEW = (0.2, 0.2, 0.2, 0.2, 0.2)

    @classmethod
    def of(cls, count: int, num_places: int) -> Support:
        """Return the agreement if `count` of all places go on with the token."""
        if count == num_places:
            return cls.ALL if count > 1 else cls.ONE
        return cls.MOST if 2 * count > num_places else cls.FEW


_NUM_LENGTHS = len(Support.ONE.value)


class Evidence(NamedTuple):
    """The reason for a guessed token: how much text before it was there before, and how often."""

    match_length: int  # number of equal tokens before it, guessed ones included
    support: Support
    is_steady: bool = False  # the same token followed the token before it the last two times


class Acceptance:
    """The chance that a guessed token is right, by what speaks for it.

    Args:
        decay: weight of a new guess.
    """

    def __init__(self, decay: float = DECAY_OF_ALL) -> None:
        self._decay = decay
        # By support, once for tokens that are not steady and once for those that are.
        self._chances = {support: (list(support.value), list(support.value)) for support in Support}

    def copy(self, decay: float) -> Acceptance:
        """Return the same chances, which change by another decay."""
        copied = Acceptance(decay)
        copied._chances = {
            support: (list(changing), list(steady))
            for support, (changing, steady) in self._chances.items()
        }
        return copied

    def chance(self, evidence: Evidence) -> float:
        """Return the chance of a guessed token, if those before it are right."""
        match_length, support, is_steady = evidence
        return self._chances[support][is_steady][_class_of(match_length)]

    def chances(self, guess: Sequence[Evidence]) -> list[float]:
        """Return the chance of each token of a guess, if those before it are right."""
        return [self.chance(evidence) for evidence in guess]

    def observe(self, evidence: Evidence, is_right: bool) -> None:
        """Record one guessed token of which all tokens before it were right."""
        chances = self._chances[evidence.support][evidence.is_steady]
        place = _class_of(evidence.match_length)
        chances[place] += self._decay * (is_right - chances[place])


def numbers_of_drafts(
    chances: Mapping[int, Sequence[float]], num_sequences: int, budget: int, costs: StepCosts
) -> dict[int, int]:
    """Return how many tokens of each guess a step should verify, so that it gains most.

    A draft costs the seconds of one more token in the step. It is worth them if it gives more
    tokens per second than the step gives without it. If the first token of a guess is right with
    the chance p, and then the second one with the chance q, the first draft gives p tokens, the
    second one p q more, and so on.

    Args:
        chances: the chance of each token of a guess if those before it are right, by ``seq_id``.
        num_sequences: number of sequences that the step decodes, each of which gives a token.
        budget: number of drafts that fit in the step.
        costs: the times of steps.
    """
    numbers: dict[int, int] = {}
    num_tokens, seconds, token_s = float(num_sequences), costs.step_s(num_sequences), costs.token_s
    # The next draft of each sequence, the most likely one first.
    heap = [(-guess[0], seq_id) for seq_id, guess in chances.items()]
    heapq.heapify(heap)
    while heap and budget > 0:
        gain, seq_id = -heap[0][0], heap[0][1]
        if gain * seconds < token_s * num_tokens:
            break
        number = numbers[seq_id] = numbers.get(seq_id, 0) + 1
        num_tokens, seconds, budget = num_tokens + gain, seconds + token_s, budget - 1
        guess = chances[seq_id]
        if number < len(guess):
            heapq.heapreplace(heap, (-gain * guess[number], seq_id))
        else:
            heapq.heappop(heap)
    return numbers


def _class_of(match_length: int) -> int:
    return min(max(match_length, 1).bit_length(), _NUM_LENGTHS) - 1
