"""Formats log-probabilities as vllm_backend's clients read them: JSON, by token id."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from paged_backend.outputs import TokenLogprobs
from paged_backend.text.detokenizer import token_bytes
from paged_backend.text.tokenizer import Tokenizer

NOT_ASKED_FOR = "null"
LOWEST = -9999.0  # JSON has no infinity


def logprobs_json(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    first: int | None = None,
) -> str:
    """Return a JSON list with one entry for each token; ``first`` is the one that begins the text.

    An entry is an object that maps token ids to their log-probability, rank and text: first the
    token itself, then the most likely tokens. The entry of a token without log-probabilities is
    null.
    """
    pairs = zip(token_ids, logprobs, strict=True)
    return json.dumps(
        [_entry(tokenizer, *pair, is_first=at == first) for at, pair in enumerate(pairs)]
    )


def _entry(
    tokenizer: Tokenizer, token_id: int, logprobs: TokenLogprobs | None, *, is_first: bool
) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    top = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    ranked = [(likely_id, logprob, rank) for rank, (likely_id, logprob) in enumerate(top, 1)]
    text = functools.partial(_text, tokenizer, is_first=is_first)
    entry: dict[str, Any] = {}
    for likely_id, logprob, rank in [(token_id, logprobs.logprob, logprobs.rank), *ranked]:
        values = {"logprob": max(logprob, LOWEST), "rank": rank, **text(likely_id)}
        entry.setdefault(str(likely_id), values)
    return entry


@functools.lru_cache(2**16)
def _text(tokenizer: Tokenizer, token_id: int, *, is_first: bool) -> dict[str, Any]:
    """Return the token's text, and its bytes if they are not whole characters."""
    data = token_bytes(tokenizer, token_id, is_first=is_first)
    try:
        return {"decoded_token": data.decode()}
    except UnicodeDecodeError:
        return {"decoded_token": data.decode(errors="replace"), "bytes": list(data)}
