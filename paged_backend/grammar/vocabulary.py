"""The model's vocabulary in the form that llguidance needs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from llguidance import LLTokenizer

from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.errors import ConfigError


def load_vocabulary(
    tokenizer: str | Path, vocab_size: int, eos_token_ids: Iterable[int] = ()
) -> LLTokenizer:
    """Load a tokenizer for matchers; takes about a second for a vocabulary of 131,072 tokens.

    Args:
        tokenizer: folder or Hugging Face id.
        vocab_size: size of the model's vocabulary; tokens that the tokenizer lacks are never
            allowed.
        eos_token_ids: tokens that end the output when the grammar allows it; by default the
            tokenizer's own.

    Raises:
        ConfigError: the tokenizer cannot be used for grammars.
    """
    return make_vocabulary(load_tokenizer(tokenizer), vocab_size, eos_token_ids)


def make_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int] = ()
) -> LLTokenizer:
    """Make a vocabulary of a loaded tokenizer; see ``load_vocabulary``."""
    eos = [token for token in eos_token_ids if token < vocab_size] or None
    try:
        return LLTokenizer(tokenizer.to_json(), n_vocab=vocab_size, eos_token=eos)
    except ValueError as error:
        raise ConfigError(f"structured outputs cannot use this tokenizer: {error}") from error


def special_token_ids(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> dict[str, int]:
    """Return the tokens, by their text, that grammars match only by their id."""
    return {
        text: token_id
        for text, token_id in tokenizer.added_tokens.items()
        if token_id < vocabulary.vocab_size and vocabulary.is_special_token(token_id)
    }
