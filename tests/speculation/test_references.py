"""The choice of the part of an earlier answer that the device gets."""

from __future__ import annotations

from paged_backend.speculation.references import Reference, choose_place
from paged_backend.speculation.token_index import SEPARATOR, Match, TokenIndex


def test_a_reference_has_a_match_and_what_follows_it() -> None:
    index = TokenIndex(64, 1)
    index.extend(range(100, 150))
    reference = Reference.around(index, 20, 10, 15)
    assert reference == (index, 10, 35, [*range(110, 135)])
    assert reference.has(20, Match(10, [20]), 15)
    assert not reference.has(20, Match(11, [20]), 15)
    assert not reference.has(20, Match(10, [20]), 16)


def test_the_place_goes_on_like_the_guess() -> None:
    index = TokenIndex(64, 1)
    index.extend([1, 2, 3, 4, SEPARATOR, 1, 2, 7, 8, SEPARATOR, 1, 2, 3])
    match = Match(2, [12, 7, 2])
    assert choose_place(index, match, [7, 8]) == (7, 2)
    assert choose_place(index, match, [3, 4]) == (2, 2)
    assert choose_place(index, match, [3, 9]) == (12, 1)
