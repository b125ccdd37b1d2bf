"""The chances of the drafts that the device draws after tokens in flight."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from paged_backend.speculation.acceptance import DECAY, DECAY_OF_ALL


class DrawnAcceptance:
    """The chance that drafts are right which the device draws after tokens in flight.

    The device knows these tokens, and looks for a match again. How likely it is to find the next
    tokens depends on how certain the text in flight is.

    Args:
        decay: weight of a new draft.
    """

    def __init__(self, decay: float = DECAY_OF_ALL) -> None:
        self._decay = decay
        # By the class of certainty: the chance of a first draft, and of one after a right one.
        self._chances = [[0.4, 0.7], [0.6, 0.8], [0.8, 0.9]]

    def copy(self, decay: float) -> DrawnAcceptance:
        """Return the same chances, which change by another decay."""
        copied = DrawnAcceptance(decay)
        copied._chances = [list(chances) for chances in self._chances]
        return copied

    def chances(self, certainty: float, number: int) -> list[float]:
        """Return the chance of each draft, if those before it are right.

        Args:
            certainty: the chance that all tokens in flight are as guessed.
            number: number of drafts.
        """
        first, next_one = self._chances[_class_of_certainty(certainty)]
        return [first] + [next_one] * (number - 1)

    def observe(self, certainty: float, number: int, num_right: int) -> None:
        """Record the drafts of a step, of which the first `num_right` were right."""
        chances = self._chances[_class_of_certainty(certainty)]
        for place in range(min(number, num_right + 1)):
            is_next = place > 0
            chances[is_next] += self._decay * ((place < num_right) - chances[is_next])


def _class_of_certainty(certainty: float) -> int:
    return (certainty >= 0.25) + (certainty >= 0.75)


class _Planned(NamedTuple):
    start: int  # position of the first token of the slice with the drafts
    certainty: float


class _Returned(NamedTuple):
    number: int  # number of drafts
    certainty: float
    num_known: int  # number of known tokens of the sequence before those of the step


class DrawnDrafts:
    """What is known about the drafts that the device draws for one sequence.

    Args:
        usual: the chances of the drafts of all sequences; they learn, too.
    """

    def __init__(self, usual: DrawnAcceptance) -> None:
        self._usual = usual
        self._acceptance = usual.copy(DECAY)
        self._planned: deque[_Planned] = deque(maxlen=2)  # a step in flight, and the next one
        self._returned: _Returned | None = None

    def chances(self, certainty: float, number: int) -> list[float]:
        """Return the chance of each draft; see `DrawnAcceptance`."""
        return self._acceptance.chances(certainty, number)

    def plan(self, start: int, certainty: float) -> None:
        """Take note of drafts that a step is going to have.

        Args:
            start: the position of the first token of the slice.
            certainty: the chance that the tokens in flight before it are as guessed.
        """
        self._planned.append(_Planned(start, certainty))

    def note_return(self, start: int, number: int, num_known: int) -> None:
        """Take note of a step that has returned; its tokens are not known yet.

        Args:
            start: the position of the first token of the slice.
            number: number of its drafts.
            num_known: number of known tokens of the sequence.
        """
        for planned in self._planned:
            if planned.start == start:
                self._returned = _Returned(number, planned.certainty, num_known)

    def learn(self, num_known: int) -> None:
        """Learn from the step that returned last, as its tokens are known now."""
        if self._returned is None:
            return
        number, certainty, num_before = self._returned
        self._returned = None
        if num_known > num_before:
            for acceptance in (self._acceptance, self._usual):
                acceptance.observe(certainty, number, num_known - num_before - 1)
