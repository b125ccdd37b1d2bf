"""Converts text to token ids and back, as `transformers` does, without importing it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from paged_backend.checkpoint.hub import is_gguf, resolve_model
from paged_backend.text.chat import ChatTemplate, choose_chat_template
from paged_backend.text.gguf_tokenizer import read_gguf_tokenizer
from paged_backend.text.resolution import resolve_tokenizer_files
from paged_backend.text.template_files import read_templates
from paged_backend.text.tokenizer_limits import check_lengths
from paged_backend.values.errors import ConfigError, InvalidRequest
from paged_backend.values.options.chat_template import ChatTemplateOptions

_MANY = 4096  # token ids that take over a millisecond to decode


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the facts that serving needs."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
        bos_token: str | None = None,
    ) -> None:
        """Own ``backend``; its truncation and padding are turned off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_id = eos_token_id  # the tokenizer's own; the model may have more
        self.chat_template = chat_template
        self._bos_token = bos_token
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.added_tokens = {token.content: id_ for id_, token in added.items()}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Return whether both have the same tokens with the same ids."""
        vocabularies = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        return next(vocabularies) == next(vocabularies)

    @functools.cached_property
    def max_token_length(self) -> int:
        """Number of characters of the longest token: n tokens have at most n times as many."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @functools.cached_property
    def decoder_steps(self) -> tuple[str, ...]:
        """The types of the decoder's steps, such as ``("ByteLevel",)``; empty without a decoder."""
        if self._backend.decoder is None:
            return ()
        state = json.loads(self._backend.to_str())["decoder"]
        return tuple(step["type"] for step in state.get("decoders", [state]))

    @property
    def has_byte_tokens(self) -> bool:
        """True if tokens such as ``<0x0A>`` stand for single bytes."""
        return "ByteFallback" in self.decoder_steps

    @functools.cached_property
    def some_word_id(self) -> int:
        """Any token with text that is neither special nor a byte."""
        ids = range(self.vocab_size)
        return next((id_ for id_ in ids if self._is_word(id_)), 0)

    def _is_word(self, token_id: int) -> bool:
        text = self.decode([token_id])  # without special tokens
        return bool(text.strip()) and not (self.token(token_id) or "").startswith("<0x")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, by default with the special tokens of a prompt.

        See `encode_batch`.
        """
        (ids,) = self.encode_batch([text], add_special_tokens=add_special_tokens)
        return ids

    def encode_batch(
        self, texts: Sequence[str | tuple[str, str]], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of several texts, or of pairs as `transformers` joins them.

        Raises:
            InvalidRequest: a text contains half of a surrogate pair, or the tokenizer's patterns
                take too many steps for it.
        """
        try:
            # Unlike the call for a single text, this call releases the GIL.
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError as error:  # raised by the library for such text
            raise InvalidRequest(
                "prompt", "must be text that UTF-8 can hold, not half of a surrogate pair"
            ) from error
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise InvalidRequest(
                "prompt", "cannot be divided by the patterns of this model's tokenizer"
            ) from error
        return [encoding.ids for encoding in encodings]

    def encode_prompts(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of prompts, which begin with bos once.

        Other than in `encode_batch`, a text that begins with bos, such as a rendered chat, gets no
        second one.
        """
        prompts = self.encode_batch(texts, add_special_tokens=add_special_tokens)
        if not add_special_tokens or self._bos_token is None:
            return prompts
        twice = [self.token_id(self._bos_token)] * 2
        return [
            ids[1:] if ids[:2] == twice and text.lstrip().startswith(self._bos_token) else ids
            for text, ids in zip(texts, prompts, strict=True)
        ]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts together; see `encode_batch`."""
        (ids,) = self.encode_batch([(first, second)])
        return ids

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry; None if there is none."""
        return self._backend.token_to_id(token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ``token_ids`` with the tokenizer's own decoder, without cleaning up spaces.

        Ids outside the vocabulary have no text.
        """
        try:
            if len(token_ids) <= _MANY:
                return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            # Unlike the call for a single list, this call releases the GIL.
            (text,) = self._backend.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise RuntimeError("the tokenizer's decoder fails") from error
        return text

    def to_json(self) -> str:
        """Return the tokenizer as the text of a ``tokenizer.json``."""
        return self._backend.to_str()

    def prepare_chat(self) -> None:
        """Start the process of the chat template soon, if there is a chat template."""
        if self.chat_template is not None:
            self.chat_template.prepare()

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of ``token_id``, not decoded; None if there is none."""
        return self._backend.id_to_token(token_id)


def _is_panic(error: BaseException) -> bool:
    """Return True for a panic of Rust, which is no `Exception` and would end a thread.

    Its class cannot be imported. Patterns panic where they need too many steps for a text.
    """
    return type(error).__name__ == "PanicException"


def load_tokenizer(
    name_or_folder: str | Path, options: ChatTemplateOptions | None = None
) -> Tokenizer:
    """Load a checkpoint's tokenizer: a bundled model's, a folder's, a GGUF file's, or a Hub id's.

    A folder's is the one that `transformers` loads, without code of the checkpoint; see
    :mod:`paged_backend.text.resolution`. ``options`` choose the chat template.

    Raises:
        ConfigError: there is no such tokenizer, it cannot be read, it has no fast version, or it
            does too much work for a short text.
    """
    folder = resolve_model(str(name_or_folder), weights=False, role="tokenizer")
    if is_gguf(folder):
        return _load_gguf(folder, options)
    templates = read_templates(folder)  # first, as its errors name the file
    resolved = resolve_tokenizer_files(folder)
    backend = tokenizers.Tokenizer.from_str(resolved.backend)
    backend.encode_special_tokens = resolved.splits_special_tokens
    template = choose_chat_template(templates, resolved.special_tokens, options)
    bos_token = resolved.special_tokens.get("bos_token")
    return Tokenizer(backend, resolved.end_token_id, template, bos_token)


def load_end_token_id(name_or_folder: str | Path) -> int | None:
    """Return the end token of a checkpoint's tokenizer without loading a folder's vocabulary.

    Raises:
        ConfigError: as `load_tokenizer`.
    """
    folder = resolve_model(str(name_or_folder), weights=False, role="tokenizer")
    if is_gguf(folder):
        return _load_gguf(folder).eos_token_id
    return resolve_tokenizer_files(folder).end_token_id


def _load_gguf(path: Path, options: ChatTemplateOptions | None = None) -> Tokenizer:
    read = read_gguf_tokenizer(path)
    try:
        check_lengths(read.backend)
    except ConfigError as error:
        raise ConfigError(f"{path} holds no usable tokenizer: {error}") from error
    template = choose_chat_template(read.templates, read.special, options)
    end_token = read.special.get("eos_token")
    end_token_id = None if end_token is None else read.backend.token_to_id(end_token)
    return Tokenizer(read.backend, end_token_id, template, read.special.get("bos_token"))
