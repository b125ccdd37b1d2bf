"""The part of an earlier answer that the device gets, and the votes of places about a guess."""

from __future__ import annotations

import gc

from paged_backend.speculation.acceptance import Support
from paged_backend.speculation.references import Reference
from paged_backend.speculation.token_index import TokenIndex
from paged_backend.speculation.votes import elect


def test_a_reference_has_the_tokens_around_some_places() -> None:
    index = TokenIndex(64, 1)
    index.extend(range(100, 150))
    reference = Reference(index, 20, before=10, after=15)
    assert reference.token_ids == [*range(110, 135)]
    assert reference.has(index, [20], before=10, after=15)
    assert reference.has(index, [49, 22, 5], before=10, after=13)
    assert not reference.has(index, [20], before=11, after=15)
    assert not reference.has(index, [20], before=10, after=16)
    assert not reference.has(TokenIndex(64, 1), [20], before=10, after=15)


def test_a_reference_keeps_no_answers_in_memory() -> None:
    index = TokenIndex(64, 1)
    index.extend(range(100, 150))
    reference = Reference(index, 20, before=10, after=15)
    del index
    gc.collect()
    assert reference._answers() is None


def test_the_places_that_win_go_on_with_all_tokens() -> None:
    followers = {12: [3, 4], 9: [3, 5, 7], 6: [3, 5, 8], 4: [3, 5, 7], 2: [9]}
    token_ids, supports, places = elect(followers, 3, 0.0)
    assert (token_ids, places) == ([3, 5, 7], [9, 4])
    assert supports == [Support.MOST, Support.MOST, Support.MOST]
    assert elect(followers, 3, 0.5) == ([3, 5], [Support.MOST] * 2, [9, 6, 4])
    assert elect({7: [1, 2]}, 2, 0.0) == ([1, 2], [Support.ONE] * 2, [7])
    assert elect({7: [1, 2], 3: [1, 2]}, 2, 0.0) == ([1, 2], [Support.ALL] * 2, [7, 3])
