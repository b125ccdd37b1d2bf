"""Reference for drafts from the text itself, token by token."""

from __future__ import annotations


def drafts_of(text: list[int], number: int, min_match: int, max_match: int) -> list[int]:
    """Return what followed the newest of the longest matches of the end of a text.

    The text after the match may go on with itself. Without a match the last token repeats.
    """
    best, start = 0, len(text) - 1
    for end in range(1, len(text)):
        length = 0
        while length < min(end, max_match) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= max(best, min_match):
            best, start = length, end
    return [text[start + place % (len(text) - start)] for place in range(number)]


def num_right(drafts: list[int], tokens: list[int]) -> int:
    """Return the number of drafts before the first one that differs from the sampled token."""
    pairs = zip(drafts, tokens, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(drafts))
