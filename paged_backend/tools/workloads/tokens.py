"""Tokenizer functions for workloads: token counts, and words of one token each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.tools.workloads.lengths import MAX_LENGTH
from paged_backend.tools.workloads.options import TokenizerContext
from paged_backend.tools.workloads.request import Message
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

MAX_WORDS = 2048  # enough variety for prompts
MIN_WORDS = 64
_SPACES = " \u2581\u0120"  # the forms of a word-initial space in vocabularies
_WORD = re.compile("[a-z]+")


class Tokens:
    """The tokenizer of the server's model."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self._tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text prompt, including special tokens."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def count_plain(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def count_chat(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of a chat, including the generation prompt.

        Raises:
            ConfigError: the tokenizer's template cannot render it.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template can raise any exception
            raise ConfigError(
                f"tokenizer {self.name} cannot render a chat ({shorten(str(error), 200)}); use "
                "prompts as text or ids"
            ) from error
        return self.count_plain(text)

    def words(self) -> list[str]:
        """Return words of one token each, also in any space-separated sequence of them.

        Raises:
            ConfigError: the vocabulary has too few such words.
        """
        words = list(itertools.islice(self._single_words(), MAX_WORDS))
        if len(words) < MIN_WORDS or self.count_plain(" ".join(words)) != len(words):
            raise ConfigError(
                f"tokenizer {self.name} lacks words of one token, which texts of an exact length "
                "are made of; use prompts as ids"
            )
        return words

    def _single_words(self) -> Iterator[str]:
        """Yield words that are one token both at the start of a text and after another word."""
        for word in sorted({piece.lstrip(_SPACES) for piece in self._tokenizer.get_vocab()}):
            if (
                _WORD.fullmatch(word)
                and self.count_plain(word) == 1
                and self.count_plain(f"{word} {word} {word}") == 3
            ):
                yield word


def load_tokens(material: TokenizerContext, purpose: str) -> Tokens:
    """Load the tokenizer named in ``material``.

    Raises:
        ConfigError: none is named, or it cannot be loaded; ``purpose`` says what needs it.
    """
    name = material.tokenizer
    if name is None:
        raise ConfigError(
            f"{purpose} need the model's tokenizer; give --tokenizer, a folder or a Hugging Face id"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{purpose} need a tokenizer: pip install transformers") from error
    folder, bundled = str(BUNDLED_MODELS.get(name, name)), " or ".join(BUNDLED_MODELS)
    try:
        # Raise the tokenizer's own limit, because it warns about longer texts.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, model_max_length=MAX_LENGTH
        )
    except Exception as error:  # its many file formats raise many kinds of exceptions
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"tokenizer {shorten(name)} cannot be loaded; give a folder that holds tokenizer.json, "
            f"a Hugging Face id, {bundled} ({shorten(reason, 200, quote=False)})"
        ) from error
    return Tokens(name, tokenizer)
