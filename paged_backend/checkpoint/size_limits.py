"""Checks the sizes in a config.json before something is made for each layer, head or label.

transformers' own classes make lists of all layers and labels while they read a file, so the raw
numbers are checked. The header of a GGUF file is compared with the file's tensors instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INNER_SIZE,
    MAX_LABELS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
)
from paged_backend.values.validation import shorten

# Families name their sizes in many ways, such as n_layer, num_layers and decoder_layers.
_LIMITS = (
    (re.compile(r"(.*_)?(n|num)_(.*_)?experts?(_.*)?"), MAX_EXPERTS),
    (re.compile(r"((.*_)?(n|num)_(.*_)?layers?)|(.*_)?layers"), MAX_LAYERS),
    (re.compile(r"((.*_)?(n|num)_(.*_)?heads?)|(.*_)?attention_heads"), MAX_HEADS),
    (re.compile(r"(.*_)?head_dim|d_kv"), MAX_HEAD_DIM),
    (re.compile(r"(.*_)?hidden_size|n_embd|d_model"), MAX_HIDDEN_SIZE),
    (re.compile(r"(.*_)?intermediate_size|ffn_dim|n_inner|d_ff"), MAX_INNER_SIZE),
    (re.compile(r"(.*_)?vocab_size"), MAX_VOCAB_SIZE),
    (re.compile(r"_?num_labels"), MAX_LABELS),
    (re.compile(r"(.*_)?max_position_embeddings|n_positions|n_ctx|max_seq_len"), MAX_POSITIONS),
)


def check_sizes(file: ConfigFile) -> None:
    """Check all sizes in a file, those in its sections included.

    Raises:
        ConfigError: one is above its limit.
    """
    for key, value in _numbers({key: file.value(key) for key in file.keys()}):
        name = key.rpartition(".")[2]
        for pattern, limit in _LIMITS:
            if pattern.fullmatch(name) and value > limit:
                raise file.error(key, f"must be an integer up to {limit}, got {shorten(value)}")


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested objects, by names with dots; the file bounds the nesting."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value
