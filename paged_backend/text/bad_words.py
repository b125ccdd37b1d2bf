"""Converts bad words to the token sequences that spell them."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.sampling_params import SamplingParams


def resolve_bad_words(tokenizer: Tokenizer, params: SamplingParams) -> SamplingParams:
    """Replace ``bad_words`` by ``bad_words_token_ids``: each word with and without a leading space.

    Raises:
        InvalidRequest: a word has no tokens.
    """
    if not params.bad_words:
        return params
    spellings: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids:
                raise InvalidRequest("bad_words", f"{word!r} has no tokens")
            spellings[token_ids] = None
    return replace(
        params, bad_words=(), bad_words_token_ids=(*params.bad_words_token_ids, *spellings)
    )
