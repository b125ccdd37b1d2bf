"""Reference for drafts from the text itself, token by token."""

from __future__ import annotations

from collections.abc import Sequence


def drafts_of(
    text: list[int],
    number: int,
    min_match: int,
    max_match: int,
    predicted: Sequence[int] = (),
) -> tuple[list[int], int]:
    """Return what followed the newest of the longest matches of the end of a text.

    The text after the match may go on with itself. Without a match the last token repeats.

    Args:
        text: the text.
        number: the number of drafts.
        min_match: number of tokens that must be equal, at least 1.
        max_match: number of tokens that are compared.
        predicted: a prediction, with matches that are newer than those of the text. The text goes
            on after it.

    Returns:
        The drafts, and the number of those that are from the prediction.
    """
    texts = [*predicted, *text]
    first = len(predicted)
    best, start = 0, len(texts) - 1
    own = [(end, first) for end in range(first + 1, len(texts))]
    for end, oldest in own + [(end, 0) for end in range(1, first)]:
        most, length = min(end - oldest, len(text), max_match), 0
        while length < most and texts[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= max(best, min_match):
            best, start = length, end
    drafts = [texts[start + place % (len(texts) - start)] for place in range(number)]
    return drafts, min(number, max(first - start, 0))


def num_right(drafts: list[int], tokens: list[int]) -> int:
    """Return the number of drafts before the first one that differs from the sampled token."""
    pairs = zip(drafts, tokens, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(drafts))
