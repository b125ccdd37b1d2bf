"""The rate of right guesses of a text, and the number of guesses that a step should verify."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from paged_backend.speculation.step_costs import StepCosts

_DECAY = 1 / 8  # weight of a new guess
# Chances before anything was observed, by the binary logarithm of the match's length.
_PRIORS = (0.3, 0.5, 0.7, 0.8, 0.9)


class Acceptance:
    """The chance that a guessed token is right, by the length of the match that it comes from."""

    def __init__(self) -> None:
        self._chances = list(_PRIORS)

    def chance(self, match_length: int) -> float:
        """Return the chance of each token of a guess, if those before it were right."""
        return self._chances[_class_of(match_length)]

    def observe(self, match_length: int, is_right: bool) -> None:
        """Record one guessed token of which all tokens before it were right."""
        place = _class_of(match_length)
        self._chances[place] += _DECAY * (is_right - self._chances[place])


def numbers_of_drafts(
    chances: Mapping[int, tuple[float, int]], num_sequences: int, budget: int, costs: StepCosts
) -> dict[int, int]:
    """Return how many tokens of each guess a step should verify, so that it gains most.

    A draft costs the seconds of one more token in the step. It is worth them if it gives more
    tokens per second than the step gives without it. A guess of which each token is right with the
    chance p gives p tokens with its first draft, p^2 more with the second, and so on.

    Args:
        chances: the chance of each token of a guess, and their number, by ``seq_id``.
        num_sequences: number of sequences that the step decodes, each of which gives a token.
        budget: number of drafts that fit in the step.
        costs: the times of steps.
    """
    numbers: dict[int, int] = {}
    num_tokens, seconds = float(num_sequences), costs.step_s(num_sequences)
    # The next draft of each sequence, the most likely one first.
    heap = [(-chance, seq_id) for seq_id, (chance, _) in chances.items()]
    heapq.heapify(heap)
    while heap and budget > 0:
        gain, seq_id = -heap[0][0], heap[0][1]
        if gain * seconds < costs.token_s * num_tokens:
            break
        numbers[seq_id] = numbers.get(seq_id, 0) + 1
        num_tokens, seconds, budget = num_tokens + gain, seconds + costs.token_s, budget - 1
        chance, length = chances[seq_id]
        if numbers[seq_id] < length:
            heapq.heapreplace(heap, (-gain * chance, seq_id))
        else:
            heapq.heappop(heap)
    return numbers


def _class_of(match_length: int) -> int:
    return min(max(match_length, 1).bit_length(), len(_PRIORS)) - 1
