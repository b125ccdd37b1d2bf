"""Parts of earlier answers in which the device finds drafts after tokens in flight.

Verifying a text that lies beside the prompt is inference with reference (Yang et al., 2023). Here
the host chooses the text, and the device looks in it for the end of the sequence, again and again.
"""

from __future__ import annotations

from typing import NamedTuple

from paged_backend.speculation.token_index import Match, TokenIndex


class Reference(NamedTuple):
    """A part of an earlier answer that the device has, or gets with the next drafts."""

    answers: TokenIndex
    start: int  # places in the index
    end: int
    token_ids: list[int]

    @classmethod
    def around(cls, index: TokenIndex, end: int, before: int, after: int) -> Reference:
        """Return the text around a place in the answers; see `TokenIndex.around`."""
        start, token_ids = index.around(end, before, after)
        return cls(index, start, start + len(token_ids), token_ids)

    def has(self, place: int, match: Match, number: int) -> bool:
        """Return True if this part has the end of a match, and the tokens that follow it.

        Args:
            place: one of the places of the match.
            match: the match.
            number: number of tokens that follow.
        """
        return self.start <= place - match.length and place + number <= self.end


def choose_place(index: TokenIndex, match: Match, guess: list[int]) -> tuple[int, int]:
    """Return the newest place of a match that goes on like the guess, or else the newest one.

    Args:
        index: the answers.
        match: places in them.
        guess: the tokens that are likely to follow.

    Returns:
        The place, and the number of tokens that follow it, at most that of the guess.
    """
    following = [index.following(end, len(guess)) for end in match.ends]
    chosen = following.index(guess) if guess in following else 0
    return match.ends[chosen], len(following[chosen])
