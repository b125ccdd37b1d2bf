"""Parts of earlier answers in which the device finds drafts after tokens in flight.

Verifying a text that is likely to be repeated is inference with reference (Yang et al., 2023). Here
the host chooses the text, and the device looks in it for the end of the sequence, again and again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from paged_backend.speculation.token_index import TokenIndex


class Reference:
    """A part of an earlier answer that the device has, or gets with the next drafts.

    Args:
        answers: the earlier answers.
        place: a place in them, around which the part lies.
        before: number of tokens before it at most.
        after: number of tokens after it at most.

    Attributes:
        token_ids: the part.
    """

    def __init__(self, answers: TokenIndex, place: int, before: int, after: int) -> None:
        self._answers = weakref.ref(answers)  # which may be dropped before a sequence ends
        self._start, self.token_ids = answers.around(place, before, after)
        self._end = self._start + len(self.token_ids)

    def has(self, answers: TokenIndex, places: Iterable[int], before: int, after: int) -> bool:
        """Return True if this part has one of the places, and the tokens around it.

        Args:
            answers: the earlier answers.
            places: places in them.
            before: number of tokens before the place.
            after: number of tokens after it.
        """
        return self._answers() is answers and any(
            self._start <= place - before and place + after <= self._end for place in places
        )
