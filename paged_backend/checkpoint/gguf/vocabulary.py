"""The vocabulary in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator

from paged_backend.checkpoint.config_file import ConfigFile

TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
# Types of tokens: pieces of text, special tokens, and others that are never divided.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# Tokens that end an answer. Files often name only one of a model's, so all known ones count.
_ENDS = ("eos", "eot", "eom")
_NAMED_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"}


def read_tokens(metadata: ConfigFile) -> list[str]:
    """Return the text of each token; empty if the file has no vocabulary.

    Raises:
        ConfigError: the list holds something else.
    """
    return read_strings(metadata, TOKENS)


def read_strings(metadata: ConfigFile, key: str) -> list[str]:
    """Return a list of strings; empty if the file has none.

    Raises:
        ConfigError: the list holds something else.
    """
    values = metadata.value(key)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise metadata.error(key, "must be an array of strings")
    return values


def read_types(metadata: ConfigFile, num_tokens: int) -> list[int]:
    """Return the type of each token.

    Raises:
        ConfigError: the list has another length, or holds something else.
    """
    types = metadata.value(TYPES)
    if types is None:
        return [NORMAL] * num_tokens
    if not isinstance(types, list) or not all(type(kind) is int for kind in types):
        raise metadata.error(TYPES, "must be an array of integers")
    if len(types) != num_tokens:
        raise metadata.error(TYPES, f"has {len(types)} entries for {num_tokens} tokens")
    return types


def special_token(metadata: ConfigFile, name: str, tokens: list[str]) -> int | None:
    """Return the id of the special token with a name such as ``eos``; None if there is none.

    Raises:
        ConfigError: no token has this id.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    if metadata.value(key) is None:
        return None
    token_id = metadata.integer(key, low=0)
    if token_id >= len(tokens):
        raise metadata.error(key, f"is {token_id}, but there are {len(tokens)} tokens")
    return token_id


def end_tokens(metadata: ConfigFile) -> Iterator[int]:
    """Yield the ids of the tokens that end an answer.

    Raises:
        ConfigError: a key is wrong.
    """
    tokens = read_tokens(metadata)
    ids = (special_token(metadata, name, tokens) for name in _ENDS)
    named = {token_id for token_id in ids if token_id is not None}
    for token_id, kind in enumerate(read_types(metadata, len(tokens))):
        if token_id in named or (kind == CONTROL and tokens[token_id] in _NAMED_ENDS):
            yield token_id
