"""The interface of drafters, which guess the next tokens of sequences (speculative decoding).

A step computes the guesses (drafts) of a sequence together with its newest token. It samples one
token after the newest token and one after each draft. A draft is right if it equals the token that
is sampled at its position. The sequence keeps the right drafts before the first wrong one, and one
more sampled token.

Sampling depends only on the seed, the position and the logits. A sequence therefore gets the same
tokens with any drafter; a good drafter only reduces the number of steps. This requires that the
platform computes the same logits for a token, no matter how many tokens a step computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from paged_backend.core.scheduler_output import DrawnDrafts, SchedulerOutput
from paged_backend.core.sequence import Sequence


class Draft(NamedTuple):
    """A guess of the next tokens of a sequence."""

    token_ids: list[int]
    is_predicted: bool = False  # they come from the prediction of the request
    # A text in which the device also looks for the drafts that it draws, such as an earlier answer.
    # The worker gets it once, so it should be the same object as long as it does not change.
    reference: list[int] = []

    def first(self, number: int) -> Draft:
        """Return the draft with at most ``number`` tokens."""
        return self._replace(token_ids=self.token_ids[:number])


NO_DRAFT = Draft([])


class Drafter(Protocol):
    """Guesses the next tokens of running sequences. Only the engine's thread uses it.

    Another engine can resume a sequence from its tokens, without any state of the drafter, because
    guesses have no influence on tokens.

    Attributes:
        draws_ahead: whether sequences with steps in flight may have drafts, which the device draws.
    """

    draws_ahead: bool = False

    def propose(self, sequences: Iterable[Sequence], budget: int) -> Mapping[int, Draft]:
        """Guess the next tokens of any of the sequences.

        Args:
            sequences: running sequences, without placeholders unless `draws_ahead` is true. The
                drafter must not change them.
            budget: number of drafts that fit in the step, over all sequences. The scheduler drops
                any further drafts.

        Returns:
            A draft for each ``seq_id``; sequences without guesses may be missing. The worker
            draws the tokens that are placeholders (``PLACEHOLDER``): its draft model does, or the
            device from the sequence's own text, and from the newest reference or the prediction of
            its request. Drafts after placeholders are placeholders.
        """
        ...

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return the sequences that should not go on before their tokens in flight are known.

        With asynchronous scheduling, a sequence goes on while a step in flight samples its newest
        token. It cannot have drafts then, unless the device draws them. The scheduler calls this
        before `propose`.

        Args:
            sequences: running sequences with one placeholder each, or more if the device draws
                their drafts.

        Returns:
            The ``seq_id`` of those for which a guess is worth more than the token of a step.
        """
        ...

    def take_drafts(self, drawn: DrawnDrafts) -> None:
        """Take note of what the worker has drawn in place of the placeholders of this step."""
        del drawn  # most drafters know their drafts

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """Take note of the duration of a step, to weigh what drafts cost against what they give."""
        ...
