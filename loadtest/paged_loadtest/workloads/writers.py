"""Prompts of an exact length from arbitrary symbols, so that a recipe need not know the format.

A symbol is a number below ``num_symbols``, and becomes exactly one token. What a format adds by
itself is its ``overhead``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from paged_backend.errors import ConfigError
from paged_loadtest.request import Message, Prompt
from paged_loadtest.workloads.lengths import Array
from paged_loadtest.workloads.options import TokenizerContext
from paged_loadtest.workloads.tokens import Tokens, load_tokens


class Writer(Protocol):
    """Makes prompts of one format."""

    @property
    def num_symbols(self) -> int:
        """How many different ones there are."""

    @property
    def overhead(self) -> int:
        """Tokens of a prompt besides its symbols."""

    def prompt(self, symbols: Array) -> Prompt:
        """The prompt that consists of these."""


class IdWriter:
    """Token ids; any will do."""

    overhead = 0

    def __init__(self, vocab_size: int) -> None:
        self.num_symbols = vocab_size
        # Prompts refer to these objects: a long trace would not fit into memory otherwise.
        self._ids = np.arange(vocab_size).astype(object)

    def prompt(self, symbols: Array) -> tuple[int, ...]:
        """The ids as they are."""
        return tuple(self._ids[symbols].tolist())


class TextWriter:
    """Words that are one token each."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._words = np.array(tokens.words(), dtype=object)

    @property
    def num_symbols(self) -> int:
        return len(self._words)

    @cached_property
    def overhead(self) -> int:
        """Of the special tokens that the tokenizer frames a prompt with."""
        return len(self.tokens.ids(self._words[0])) - 1

    def text(self, symbols: Array) -> str:
        """The words with spaces between."""
        return " ".join(self._words[symbols].tolist())

    def prompt(self, symbols: Array) -> Prompt:
        """The text alone."""
        return self.text(symbols)


class ChatWriter(TextWriter):
    """One message of such words."""

    @cached_property
    def overhead(self) -> int:
        """Of the template."""
        return self.tokens.count_chat(self._messages(np.zeros(1, np.int64))) - 1

    def prompt(self, symbols: Array) -> Prompt:
        """What a user says first."""
        return self._messages(symbols)

    def _messages(self, symbols: Array) -> tuple[Message, ...]:
        return ({"role": "user", "content": self.text(symbols)},)


def make_writer(prompt_format: str, material: TokenizerContext) -> Writer:
    """The writer of ids, text or chat.

    Raises:
        ConfigError: it needs a tokenizer, or a size of the vocabulary, that is not there.
    """
    if prompt_format == "ids":
        if material.vocab_size is None:
            raise ConfigError("prompts of token ids need the model's --vocab-size")
        return IdWriter(material.vocab_size)
    kind = TextWriter if prompt_format == "text" else ChatWriter
    return kind(load_tokens(material, f"{prompt_format} prompts"))
