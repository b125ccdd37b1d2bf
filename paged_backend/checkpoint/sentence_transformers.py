"""Reads how sentence-transformers makes embeddings of a checkpoint: its modules and its pooling.

There are two layouts of the pooling's config.json: older ones have a flag for each mode of pooling,
and newer ones the names of the modes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import read_json
from paged_backend.values.pooling_params import Pooling, PoolingType
from paged_backend.values.validation import shorten

MODULES = "modules.json"
_TRANSFORMER = "sentence_bert_config.json"  # file of the module Transformer for all kinds of models

_TYPES = {"lasttoken": PoolingType.LAST, "mean": PoolingType.MEAN, "cls": PoolingType.CLS}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DIMENSION_KEYS = "embedding_dimension", "word_embedding_dimension"
_ORDERS = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def has_modules(checkpoint: Path) -> bool:
    """Return True if the checkpoint is one of sentence-transformers."""
    return (checkpoint / MODULES).exists()


def read_pooling(checkpoint: Path, hidden_size: int) -> Pooling:
    """Read what a checkpoint of sentence-transformers does with the hidden states.

    Args:
        checkpoint: a folder with a ``modules.json``.
        hidden_size: size of the model's hidden states.

    Raises:
        ConfigError: a file is missing or wrong, or the checkpoint has a module or a mode of pooling
            that is not supported.
    """
    kinds, paths = _modules(checkpoint / MODULES)
    _check_texts(checkpoint / _TRANSFORMER)
    pooling = ConfigFile.read(checkpoint / paths[1] / "config.json")
    kind = _type(pooling)
    if not pooling.flag("include_prompt", True) and kind is not PoolingType.LAST:
        raise pooling.error("include_prompt", "is false, which is only supported for lasttoken")
    for key in _DIMENSION_KEYS:
        if pooling.integer(key, hidden_size) != hidden_size:
            raise pooling.error(
                key, f"must be the model's hidden_size ({hidden_size}), got {pooling.value(key)}"
            )
    return Pooling(kind, normalize=kinds[-1] == "Normalize")


def read_max_length(checkpoint: Path) -> int | None:
    """Read the number of tokens after which sentence-transformers cuts a text off, if it does.

    Raises:
        ConfigError: it is not a positive integer.
    """
    file = checkpoint / _TRANSFORMER
    if not has_modules(checkpoint) or not file.exists():
        return None
    config, key = ConfigFile.read(file), "max_seq_length"
    return None if config.value(key) is None else config.integer(key, high=2**31)


def _check_texts(file: Path) -> None:
    """Refuse a checkpoint that changes texts before they are tokenized.

    Raises:
        ConfigError: the checkpoint changes texts.
    """
    if not file.exists():
        return
    config = ConfigFile.read(file)
    if config.flag("do_lower_case", False):
        raise config.error("do_lower_case", "is true, which is not supported")
    inputs = config.section("modality_config")
    if inputs is not None and "message" in inputs:
        raise config.error(
            "modality_config",
            "has the key message, so the chat template makes messages of texts, which is not "
            "supported",
        )


def _modules(file: Path) -> tuple[list[str], list[str]]:
    """Return the names of the modules' classes, and their folders."""
    entries: Any = read_json(file)
    try:
        kinds = [str(entry["type"]).rpartition(".")[2] for entry in entries]
        paths = [str(entry["path"]) for entry in entries]
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{file} must hold a JSON list of modules with type and path") from error
    if kinds not in _ORDERS:
        allowed = " or ".join(", ".join(order) for order in _ORDERS)
        got = shorten(", ".join(kinds), 120, quote=False)
        raise ConfigError(f"{file}: the modules must be {allowed}; got {got}")
    if paths[0] != "":
        raise ConfigError(
            f"{file}: the path of Transformer must be empty, got {shorten(paths[0])}; give the "
            "folder that holds config.json"
        )
    if Path(paths[1]).name != paths[1]:
        raise ConfigError(
            f"{file}: the path of Pooling must be a folder next to it, got {shorten(paths[1])}"
        )
    return kinds, paths


def _type(pooling: ConfigFile) -> PoolingType:
    key, modes = "pooling_mode", pooling.value("pooling_mode")
    if modes is None:
        flags = [flag for flag in _FLAGS if pooling.flag(flag, False)]
        modes = [_FLAGS[flag] for flag in flags] or ["mean"]
        key = ", ".join(flags)
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _TYPES:
        raise pooling.error(
            key, f"must be one of {', '.join(_TYPES)}; got {shorten(modes, quote=False)}"
        )
    return _TYPES[modes[0]]
