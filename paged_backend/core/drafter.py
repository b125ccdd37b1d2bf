"""The interface of speculative decoding: whatever guesses the next tokens of a sequence.

A step computes the guesses (drafts) together with the newest token, samples after each of them, and
keeps the drafts that equal the sampled tokens. Sampling depends on the seed, the position and the
logits only, so a sequence gets the same tokens with any drafter, and a good one saves steps. This
holds as far as a platform computes the same logits for a token alone and for a token among others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from paged_backend.core.sequence import Sequence


class Drafter(Protocol):
    """Guesses the next tokens of running sequences; used by the engine's thread only.

    Guesses must follow from the tokens of a sequence alone, so that a sequence that is resumed by
    another engine needs nothing else.
    """

    def propose(self, sequences: Iterable[Sequence], budget: int) -> Mapping[int, list[int]]:
        """Guess the next tokens of some sequences.

        Args:
            sequences: running sequences whose tokens are all known; must not be changed.
            budget: number of drafts that the step has room for; more are cut off.

        Returns:
            The guesses by ``seq_id``, each a token id of the model.
        """
        ...


class NoDrafter:
    """Proposes nothing: each step samples one token of a sequence."""

    def propose(self, sequences: Iterable[Sequence], budget: int) -> Mapping[int, list[int]]:
        """Return no drafts."""
        return {}
