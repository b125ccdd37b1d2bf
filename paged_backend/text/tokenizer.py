"""Converts text to token ids and back, as `transformers` does, without importing it if possible."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paged_backend.checkpoint.hub import is_gguf, resolve_model
from paged_backend.errors import ConfigError, InvalidRequest
from paged_backend.json_file import read_json_object
from paged_backend.options.chat_template import ChatTemplateOptions
from paged_backend.text.chat import (
    ChatTemplate,
    choose_chat_template,
    load_chat_template,
    token_content,
)
from paged_backend.text.gguf_tokenizer import read_gguf_tokenizer
from paged_backend.validation import shorten

_TOKENIZER_FILE = "tokenizer.json"
_MANY = 4096  # token ids that take over a millisecond to decode
_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the facts that serving needs."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Own ``backend``; its truncation and padding are turned off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_id = eos_token_id  # the tokenizer's own; the model may have more
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.added_tokens = {token.content: id_ for id_, token in added.items()}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

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
            InvalidRequest: a text contains half of a surrogate pair.
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
        return [encoding.ids for encoding in encodings]

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
        if len(token_ids) <= _MANY:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Unlike the call for a single list, this call releases the GIL.
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
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


def load_tokenizer(
    name_or_folder: str | Path, options: ChatTemplateOptions | None = None
) -> Tokenizer:
    """Load a checkpoint's tokenizer: a bundled model's, a folder's, a GGUF file's, or a Hub id's.

    A ``tokenizer.json`` is read directly unless ``tokenizer_config.json`` changes its behavior. In
    that case, or if there is none, `transformers` (which takes seconds to import) converts the
    files to a fast tokenizer. Code of a checkpoint is never run. ``options``
    choose the chat template.

    Raises:
        ConfigError: there is no such tokenizer, it cannot be read, or it has no fast version.
    """
    folder = resolve_model(str(name_or_folder), weights=False, role="tokenizer")
    if is_gguf(folder):
        return _load_gguf(folder, options)
    config = read_json_object(folder / _CONFIG_FILE) if (folder / _CONFIG_FILE).exists() else {}
    backend = _read(folder / _TOKENIZER_FILE)
    if backend is None or not _agrees(backend, config):
        backend, eos_token = _convert(folder)
    else:
        eos_token = token_content(config.get("eos_token"))
    eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
    return Tokenizer(backend, eos_token_id, load_chat_template(folder, options=options))


def _load_gguf(path: Path, options: ChatTemplateOptions | None) -> Tokenizer:
    read = read_gguf_tokenizer(path)
    template = choose_chat_template(read.templates, read.special, options)
    eos_token = read.special.get("eos_token")
    eos_token_id = None if eos_token is None else read.backend.token_to_id(eos_token)
    return Tokenizer(read.backend, eos_token_id, template)


def _read(file: Path) -> tokenizers.Tokenizer | None:
    if not file.exists():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(f"{file} holds no tokenizer: {_first_line(error)}") from error


def _agrees(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> bool:
    """Return True if ``backend`` already behaves as ``config`` says."""
    added = {str(id_): token for id_, token in backend.get_added_tokens_decoder().items()}
    special = {token.content for token in added.values() if token.special}
    wanted = config.get("added_tokens_decoder") or {}
    return (
        not config.get("split_special_tokens")
        and special.issuperset(_special_tokens(config))
        and isinstance(wanted, dict)
        and all(_is_token(added.get(token_id), entry) for token_id, entry in wanted.items())
        and _frames_as(backend, config)
    )


def _is_token(token: tokenizers.AddedToken | None, entry: object) -> bool:
    return (
        token is not None
        and isinstance(entry, dict)
        and token.content == entry.get("content")
        and token.special == entry.get("special", False)
    )


def _frames_as(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> bool:
    """Whether prompts get the special tokens that ``add_bos_token/add_eos_token`` ask for."""
    frame = backend.encode("", add_special_tokens=True).tokens
    for flag, name, at in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
        token = token_content(config.get(name))
        framed = bool(frame) and frame[at] == token
        if flag in config and bool(config[flag] and token is not None) != framed:
            return False
    return True


def _special_tokens(config: dict[str, Any]) -> Iterator[str]:
    values = [config.get(f"{name}_token") for name in _SPECIAL_NAMES]
    for key in _SPECIAL_LISTS:
        more = config.get(key) or []
        values.extend(more.values() if isinstance(more, dict) else more)
    return (content for content in map(token_content, values) if content is not None)


def _convert(folder: Path) -> tuple[tokenizers.Tokenizer, str | None]:
    """Return a fast tokenizer made by `transformers`, and its end-of-sequence token."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # its converters raise various types
        raise ConfigError(
            f"no tokenizer can be made of the files in {folder}: {_first_line(error)}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(
            f"{folder}: {type(loaded).__name__} has no fast version; add a {_TOKENIZER_FILE}"
        )
    return backend, loaded.eos_token


def _first_line(error: Exception) -> str:
    return shorten(str(error).strip().split("\n")[0], 200, quote=False)
