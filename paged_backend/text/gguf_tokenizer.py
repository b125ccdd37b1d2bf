"""Builds a tokenizer from the vocabulary in a GGUF file.

The conversion of transformers is not used: it adds a token that the model does not have, divides
special tokens with other letters than ASCII's, and takes the words of unknown vocabularies for
GPT-2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
)

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.gguf.header import read_header
from paged_backend.checkpoint.gguf.vocabulary import (
    CONTROL,
    NORMAL,
    TOKENS,
    USER_DEFINED,
    read_strings,
    read_tokens,
    read_types,
    special_token,
)
from paged_backend.text.gguf_words import KINDS_OF_WORDS
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

_MODEL = "tokenizer.ggml.model"
_WORDS = "tokenizer.ggml.pre"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_TEMPLATE = "tokenizer.chat_template"
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_SPACE = "\u2581"  # stands for a space in pieces of SentencePiece
_MAX_PIECE = 256  # characters of a piece that is merged; SentencePiece makes them of at most 16
_MAX_MERGES = 2**21  # three times as many as the largest vocabularies have


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a file says about its tokenizer.

    Attributes:
        backend: the tokenizer, added tokens included.
        special: the text of special tokens, by names such as ``bos_token``.
        templates: the chat templates by name; ``default`` is the one without a name.
    """

    backend: Tokenizer
    special: dict[str, str]
    templates: dict[str, str]


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ConfigError: the file has none, or one that is damaged or of a kind that is not supported.
    """
    metadata = read_header(path).metadata
    tokens = read_tokens(metadata)
    if not tokens:
        raise metadata.error(TOKENS, "is missing; name another tokenizer (tokenizer)")
    ids = {name: special_token(metadata, key, tokens) for name, key in _SPECIAL.items()}
    special = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    try:
        backend = _build(metadata, tokens, special)
    except ConfigError:
        raise
    except Exception as error:  # the library raises no narrower type
        reason = shorten(str(error).strip().split("\n")[0], 200, quote=False)
        raise ConfigError(f"{path} holds no tokenizer: {reason}") from error
    return GgufTokenizer(
        backend,
        {f"{name}_token": text for name, text in special.items()},
        _templates(metadata),
    )


def _templates(metadata: ConfigFile) -> dict[str, str]:
    """The chat template, and those with a name behind the key, such as ``tool_use``."""
    named = f"{_TEMPLATE}."
    keys = {_TEMPLATE: "default"}
    keys |= {key: key.removeprefix(named) for key in metadata.keys() if key.startswith(named)}
    templates = {name: metadata.text(key, "") for key, name in keys.items()}
    return {name: template for name, template in templates.items() if template}


def _build(metadata: ConfigFile, tokens: list[str], special: dict[str, str]) -> Tokenizer:
    if metadata.text(_MODEL, "", ("gpt2", "llama")) == "gpt2":
        backend, bos = _byte_level(metadata, tokens)
    else:
        backend, bos = _sentencepiece(metadata, tokens, special.get("unk")), True
    _add_tokens(backend, metadata, tokens, set(special.values()))
    _frame(backend, metadata, special, bos)
    return backend


def _byte_level(metadata: ConfigFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """A vocabulary of bytes, and whether its prompts begin with bos by default."""
    name = metadata.value(_WORDS)
    words = KINDS_OF_WORDS.get(name) if isinstance(name, str) else None
    if words is None:
        known = ", ".join(KINDS_OF_WORDS)
        raise metadata.error(
            _WORDS,
            f"must be one of {known}, got {shorten(name)}; name another tokenizer (tokenizer)",
        )
    merges = []
    for entry in read_strings(metadata, _MERGES):
        left, _, right = entry.partition(" ")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(_ids(tokens), merges, ignore_merges=words.whole))
    if words.normalizer is not None:
        backend.normalizer = words.normalizer()
    backend.pre_tokenizer = words.split()
    backend.decoder = decoders.ByteLevel()
    return backend, words.bos


def _sentencepiece(metadata: ConfigFile, tokens: list[str], unknown: str | None) -> Tokenizer:
    """A vocabulary of pieces, and of single bytes for all that they lack."""
    merges = _merges(metadata, tokens)
    backend = Tokenizer(
        models.BPE(_ids(tokens), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges(metadata: ConfigFile, tokens: list[str]) -> list[tuple[str, str]]:
    """The merges of pieces, the piece with the highest score first."""
    scores = metadata.value(_SCORES)
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise metadata.error(_SCORES, f"must be an array of {len(tokens)} numbers")
    types = read_types(metadata, len(tokens))
    text = [kind in (NORMAL, USER_DEFINED) for kind in types]
    pieces = {token for token, is_text in zip(tokens, text, strict=True) if is_text}
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(tokens)), key=lambda index: -scores[index]):
        if text[index]:
            merges += _halves(tokens[index], pieces)
        if len(merges) > _MAX_MERGES:
            raise metadata.error(TOKENS, f"stands for more than {_MAX_MERGES} merges")
    return merges


def _halves(piece: str, pieces: set[str]) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that a piece can be merged from."""
    for middle in range(1, len(piece) if len(piece) <= _MAX_PIECE else 0):
        if piece[:middle] in pieces and piece[middle:] in pieces:
            yield piece[:middle], piece[middle:]


def _add_tokens(
    backend: Tokenizer, metadata: ConfigFile, tokens: list[str], special: set[str]
) -> None:
    """Add the tokens that are found in text before it is divided."""
    added = [
        AddedToken(token, special=kind == CONTROL or token in special, normalized=False)
        for token, kind in zip(tokens, read_types(metadata, len(tokens)), strict=True)
        if kind in (CONTROL, USER_DEFINED) or token in special
    ]
    backend.add_tokens(added)


def _frame(backend: Tokenizer, metadata: ConfigFile, special: dict[str, str], bos: bool) -> None:
    """Put special tokens around prompts."""
    first = metadata.flag("tokenizer.ggml.add_bos_token", bos) and special.get("bos")
    last = metadata.flag("tokenizer.ggml.add_eos_token", False) and special.get("eos")
    framing = [token for token in (first, last) if token]
    if framing:
        template = [*([first] if first else []), "$A", *([last] if last else [])]
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(framing)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(tokens)}
