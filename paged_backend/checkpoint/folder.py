"""Checks the files of a folder before a library reads those that it finds there by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paged_backend.values.json_file import read_json
from paged_backend.values.regular_file import check_regular

MAX_TOKENIZER_BYTES = 2**27  # tokenizer.json or vocabulary; Gemma 3's have 2**25

_TOKENIZER = "tokenizer.json"  # parsed by a library that bounds the nesting itself
_WEIGHTS = (".safetensors", ".safetensors.index.json")  # checked by the reader of the weights
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".bpe")
_TEMPLATES = "additional_chat_templates"


def check_texts(folder: Path) -> None:
    """Check configurations, tokenizers and templates: regular files of bounded size and nesting.

    Raises:
        ConfigError: one of them is not.
    """
    for path in _files(folder):
        if path.suffix == ".json" and path.name != _TOKENIZER:
            read_json(path)
        else:
            check_regular(path, MAX_TOKENIZER_BYTES)


def _files(folder: Path) -> Iterator[Path]:
    for place in (folder, folder / _TEMPLATES):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            is_read = path.exists() and not path.name.endswith(_WEIGHTS)
            if is_read and not path.name.startswith(".") and path.suffix in _SUFFIXES:
                yield path
