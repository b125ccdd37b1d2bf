"""Formats log-probabilities as vllm_backend's clients read them: JSON, by token id."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from typing import Any

from paged_backend.text.detokenizer import token_bytes
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.outputs import TokenLogprobs

NOT_ASKED_FOR = "null"
LOWEST = -9999.0  # JSON has no infinity
VALUES_AT_ONCE = 1024  # log-probabilities that are formatted in one go, in about a millisecond
PAUSE_S = 1e-4  # between them


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
    parts, num_values = [], 0
    for at, (token_id, entry) in enumerate(zip(token_ids, logprobs, strict=True)):
        parts.append(json.dumps(_entry(tokenizer, token_id, entry, is_first=at == first)))
        num_values += 1 if entry is None else 1 + len(entry.top_token_ids)
        if num_values >= VALUES_AT_ONCE:
            time.sleep(PAUSE_S)  # releases the GIL for the thread that sends small responses
            num_values = 0
    return f"[{', '.join(parts)}]"


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
