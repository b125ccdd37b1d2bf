"""The tokens with which most of the earlier places of a match go on."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from paged_backend.speculation.acceptance import Support


class Elected(NamedTuple):
    """The tokens that won, and the places that go on with all of them."""

    token_ids: list[int]
    supports: list[Support]  # one for each token
    places: list[int]


def elect(followers: dict[int, list[int]], number: int, min_share: float) -> Elected:
    """Let places vote about one token after the other; those that lose have no further vote.

    Args:
        followers: the tokens that follow each place, at most `number`; the first place wins a draw.
        number: number of tokens at most.
        min_share: the share of all places that a token needs.
    """
    places, texts = list(followers), list(followers.values())
    needed = min_share * len(texts)
    token_ids: list[int] = []
    supports: list[Support] = []
    while len(token_ids) < number:
        place = len(token_ids)
        if texts.count(texts[0]) == len(texts):  # nothing is left to vote about
            rest = texts[0][place:]
            supports += [Support.of(len(texts), len(texts))] * len(rest)
            return Elected(token_ids + rest, supports, places)
        votes = Counter(text[place] for text in texts if len(text) > place)
        if not votes:
            break
        ((token_id, count),) = votes.most_common(1)
        if count < needed:
            break
        token_ids.append(token_id)
        supports.append(Support.of(count, votes.total()))
        agreeing = [
            (end, text)
            for end, text in zip(places, texts, strict=True)
            if len(text) > place and text[place] == token_id
        ]
        places, texts = [end for end, _ in agreeing], [text for _, text in agreeing]
    return Elected(token_ids, supports, places)
