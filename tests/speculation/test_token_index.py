"""The search for repetitions, compared with one that looks at every place."""

from __future__ import annotations

import random

import pytest

from paged_backend.speculation.token_index import SEPARATOR, TokenIndex

WINDOW = 64


def longest_match(text: list[int], max_length: int) -> int:
    """The length of the longest end of a text that occurs in its window, before its last token."""
    kept = text[-WINDOW:]
    found = 0
    for end in range(1, len(kept)):
        length = 0
        while length < min(max_length, end) and kept[end - 1 - length] == text[-1 - length]:
            length += 1
        found = max(found, length)
    return found


@pytest.mark.parametrize("key_length", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [3, 60])
def test_matches_are_earlier_text(key_length: int, vocab_size: int) -> None:
    """Tokens arrive one at a time and many at once, also more than the window holds."""
    rng = random.Random(vocab_size + key_length)
    num_found = 0
    for _ in range(40):
        index, text = TokenIndex(WINDOW, key_length), list[int]()
        for _ in range(rng.randint(1, 12)):
            size = rng.choice([1, 2, 31, 32, 33, 70, 150])
            added = [rng.randrange(vocab_size) for _ in range(size)]
            if text and rng.random() < 0.4:  # a repetition
                start = rng.randrange(max(len(text) - WINDOW, 0), len(text))
                added = text[start : start + size]
            index.extend(added)
            text += added
            assert index.num_tokens == len(text)
            match = index.find(text[-20:], 12)
            wanted = longest_match(text, 12)
            # Only the newest places with a hash are compared, so a common run may be missed.
            assert match.length <= wanted
            assert vocab_size == 3 or match.length == (wanted if wanted >= key_length else 0)
            assert match.ends == sorted(match.ends, reverse=True)
            for end in match.ends:
                assert len(text) - WINDOW <= end - match.length and end < len(text)
                assert text[end - match.length : end] == text[-match.length :]
                assert index.following(end, 5) == text[end : end + 5]
            num_found += bool(match.ends)
    assert num_found


def test_a_match_reaches_into_no_other_text() -> None:
    index = TokenIndex(WINDOW, 2)
    index.extend([SEPARATOR, 1, 2, 3, SEPARATOR, 9, 2, 3, 4, SEPARATOR])
    match = index.find([1, 2, 3], 8)
    assert (match.length, match.ends) == (3, [4])
    assert index.following(4, 5) == []
    assert index.find([5, 2, 3], 8).ends == [8, 4]
    assert index.following(8, 5) == [4]


def test_the_text_around_a_place_ends_where_the_next_one_begins() -> None:
    index = TokenIndex(WINDOW, 2)
    index.extend([1, 2, 3, SEPARATOR, 4, 5, 6, 7, SEPARATOR, 8])
    assert index.around(6, 9, 9) == (4, [4, 5, 6, 7])
    assert index.around(6, 1, 1) == (5, [5, 6])
    assert index.around(2, 9, 9) == (0, [1, 2, 3])
    assert index.around(10, 9, 9) == (9, [8])
    index.forget_before(5)
    assert index.around(6, 9, 9) == (5, [5, 6, 7])
    index.extend(range(100, 100 + WINDOW - 3))
    assert index.around(8, 9, 0) == (7, [7])


def test_what_was_forgotten_is_not_found() -> None:
    index = TokenIndex(WINDOW, 2)
    index.extend([1, 2, 3, 4, 1, 2, 5])
    assert index.find([1, 2], 8).ends == [6, 2]
    index.forget_before(3)
    assert index.find([1, 2], 8).ends == [6]
    index.forget_before(7)
    assert index.find([1, 2], 8).ends == []
