"""A tokenizer as workloads need it: how long a text is, and words that are one token each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.errors import ConfigError
from paged_backend.validation import shorten
from paged_loadtest.request import Message
from paged_loadtest.workloads.lengths import MAX_LENGTH
from paged_loadtest.workloads.options import TokenizerContext

MAX_WORDS = 2048  # more would make no difference
MIN_WORDS = 64
_SPACES = " \u2581\u0120"  # as vocabularies write them at the beginning of a word
_WORD = re.compile("[a-z]+")


class Tokens:
    """The tokenizer that the server has."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self._tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """Of a text prompt, with the special tokens that frame it."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def count_plain(self, text: str) -> int:
        """Tokens of a text alone."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def count_chat(self, messages: Sequence[Message]) -> int:
        """Tokens of a chat that waits for an answer.

        Raises:
            ConfigError: the tokenizer's template cannot render it.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            raise ConfigError(
                f"tokenizer {self.name} cannot render a chat ({shorten(str(error), 200)}); use "
                "prompts as text or ids"
            ) from error
        return self.count_plain(text)

    def words(self) -> list[str]:
        """Words of which any sequence, with spaces between, has as many tokens as words.

        Raises:
            ConfigError: the vocabulary has too few.
        """
        words = list(itertools.islice(self._single_words(), MAX_WORDS))
        if len(words) < MIN_WORDS or self.count_plain(" ".join(words)) != len(words):
            raise ConfigError(
                f"tokenizer {self.name} lacks words of one token, which texts of an exact length "
                "are made of; use prompts as ids"
            )
        return words

    def _single_words(self) -> Iterator[str]:
        """Those that are one token at the beginning of a text, and after another word."""
        for word in sorted({piece.lstrip(_SPACES) for piece in self._tokenizer.get_vocab()}):
            if (
                _WORD.fullmatch(word)
                and self.count_plain(word) == 1
                and self.count_plain(f"{word} {word} {word}") == 3
            ):
                yield word


def load_tokens(material: TokenizerContext, purpose: str) -> Tokens:
    """Load the tokenizer of the material.

    Raises:
        ConfigError: it has none, or one that cannot be loaded; ``purpose`` says what needs it.
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
    folder = str(MODEL_DIR) if name == "demo" else name
    try:
        # Without a limit of its own: it warns of longer texts otherwise.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, model_max_length=MAX_LENGTH
        )
    except Exception as error:  # it raises what its many kinds of files make it raise
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"tokenizer {shorten(name)} cannot be loaded; give a folder that holds tokenizer.json, "
            f"a Hugging Face id, or demo ({shorten(reason, 200, quote=False)})"
        ) from error
    return Tokens(name, tokenizer)
