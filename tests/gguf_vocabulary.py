"""Writes a tokenizer into a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer


def add_vocabulary(writer: GGUFWriter, tokenizer: Tokenizer, words: str | None) -> None:
    """Add the vocabulary of a BPE tokenizer: of bytes, which has a kind of words, or of pieces."""
    model = json.loads(tokenizer.to_str())["model"]
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    tokens = [str(tokenizer.id_to_token(token_id)) for token_id in range(count)]
    types = [TokenType.BYTE if token.startswith("<0x") else TokenType.NORMAL for token in tokens]
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    writer.add_tokenizer_model("llama" if words is None else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if words is None:
        order = {"".join(merge): -float(rank) for rank, merge in enumerate(model["merges"], 1)}
        writer.add_token_scores([order.get(token, -1e4) for token in tokens])
    else:
        writer.add_tokenizer_pre(words)
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])


def write_vocabulary(
    path: Path,
    tokenizer: Tokenizer,
    words: str | None,
    **metadata: bool | int | str | list[dict[str, str]],
) -> Path:
    """Write a file that holds nothing but a vocabulary and keys of the tokenizer."""
    writer = GGUFWriter(path, "llama")
    add_vocabulary(writer, tokenizer, words)
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    close(writer)
    return path


def close(writer: GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
