"""Writers turn symbols into prompts of an exact length, so that recipes need not know the format.

A symbol is an integer below ``num_symbols`` and becomes exactly one token. The tokens that the
format itself adds are its ``overhead``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np

from paged_backend.tools.workloads.lengths import Array
from paged_backend.tools.workloads.options import TokenizerContext
from paged_backend.tools.workloads.request import Message, Prompt
from paged_backend.tools.workloads.tokens import Tokens, load_tokens
from paged_backend.values.errors import ConfigError


class Writer(Protocol):
    """Creates prompts of one format."""

    @property
    def num_symbols(self) -> int:
        """Number of different symbols."""

    @property
    def overhead(self) -> int:
        """Number of tokens of a prompt besides its symbols."""

    def prompt(self, symbols: Array) -> Prompt:
        """Create the prompt of these symbols."""


class IdWriter:
    """Prompts of token ids; every id is a symbol."""

    overhead = 0

    def __init__(self, vocab_size: int) -> None:
        self.num_symbols = vocab_size
        # Prompts share these int objects, or a long trace would not fit into memory.
        self._ids = np.arange(vocab_size).astype(object)

    def prompt(self, symbols: Array) -> tuple[int, ...]:
        """Return the symbols as token ids."""
        return tuple(self._ids[symbols].tolist())


class TextWriter:
    """Text prompts of words that are one token each."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._words = np.array(tokens.words(), dtype=object)

    @property
    def num_symbols(self) -> int:
        return len(self._words)

    @cached_property
    def overhead(self) -> int:
        """Number of special tokens that the tokenizer adds to a prompt."""
        return len(self.tokens.ids(self._words[0])) - 1

    def text(self, symbols: Array) -> str:
        """Return the words, separated by spaces."""
        return " ".join(self._words[symbols].tolist())

    def prompt(self, symbols: Array) -> Prompt:
        """Return the text as the prompt."""
        return self.text(symbols)


class ChatWriter(TextWriter):
    """Chat prompts: one user message of words that are one token each."""

    @cached_property
    def overhead(self) -> int:
        """Number of tokens that the chat template adds."""
        return self.tokens.count_chat(self._messages(np.zeros(1, np.int64))) - 1

    def prompt(self, symbols: Array) -> Prompt:
        """Return the words as a single user message."""
        return self._messages(symbols)

    def _messages(self, symbols: Array) -> tuple[Message, ...]:
        return ({"role": "user", "content": self.text(symbols)},)


def make_writer(prompt_format: str, material: TokenizerContext) -> Writer:
    """Create the writer for ``ids``, ``text`` or ``chat`` prompts.

    Raises:
        ConfigError: the required tokenizer or vocabulary size is missing or cannot be used.
    """
    if prompt_format == "ids":
        if material.vocab_size is None:
            raise ConfigError("prompts of token ids need the model's --vocab-size")
        return IdWriter(material.vocab_size)
    kind = TextWriter if prompt_format == "text" else ChatWriter
    return kind(load_tokens(material, f"{prompt_format} prompts"))
