"""Reads config.json for models that transformers computes, and decides which models those are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.context_length import context_length, default_length
from paged_backend.checkpoint.folder import check_texts
from paged_backend.checkpoint.hub import is_gguf
from paged_backend.checkpoint.limits import MAX_HIDDEN_SIZE, MAX_POSITIONS, MAX_VOCAB_SIZE
from paged_backend.checkpoint.model_config import DTYPES, read_eos_token_ids
from paged_backend.checkpoint.registry import ARCHITECTURES, has_output_layer, is_supported
from paged_backend.checkpoint.shape_reader import computes, read_dtype
from paged_backend.checkpoint.size_limits import check_sizes
from paged_backend.checkpoint.text_part import text_part
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """The facts that a worker needs about a model that transformers computes."""

    architecture: str  # the name of the class in transformers
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int  # tokens of prompt and output, after the scaling of rope
    default_max_model_len: int  # where no option sets it; at most `max_position_embeddings`
    dtype: torch.dtype  # dtype of the checkpoint
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    file: ConfigFile
    has_output_layer: bool = True


def uses_fallback(checkpoint: Path, model_impl: str) -> bool:
    """Return whether transformers computes a model: if this is asked for, or nothing else can.

    Args:
        checkpoint: the folder or file.
        model_impl: the value of the option.
    """
    if is_gguf(checkpoint) or model_impl in ("paged", "vllm"):
        return False
    if model_impl == "transformers":
        return True
    path = checkpoint / "config.json"
    if not path.exists():
        return False
    config = ConfigFile.read(path)
    check_sizes(config)
    config = text_part(config)
    names = config.value("architectures")
    if not isinstance(names, list) or not any(map(is_supported, names)):
        return isinstance(names, list)
    if not has_output_layer(config):
        return False
    return not computes(config)


def load_fallback_config(checkpoint: Path) -> FallbackConfig:
    """Read what a worker needs by means of transformers' own configuration class.

    Raises:
        ConfigError: transformers does not know the model, or it does not generate text.
    """
    file = ConfigFile.read(checkpoint / "config.json")
    architecture = _find_class(file)
    config = read_auto_config(checkpoint, file).get_text_config(decoder=True)
    vocab_size = find_integer(file, config, "vocab_size", MAX_VOCAB_SIZE)
    positions = _positions(file, config)
    sections = _rope_sections(file, config)
    longest = context_length(sections, positions)
    return FallbackConfig(
        architecture=architecture,
        hidden_size=find_integer(file, config, "hidden_size", MAX_HIDDEN_SIZE),
        vocab_size=vocab_size,
        max_position_embeddings=longest,
        default_max_model_len=default_length(sections, longest),
        dtype=DTYPES[read_dtype(file)],
        eos_token_ids=read_eos_token_ids(checkpoint, file, vocab_size),
        file=file,
    )


def _positions(file: ConfigFile, config: Any) -> int:
    """Return the longest text of a model, which MPT and BLOOM give by keys of other names.

    Most files of BLOOM give no length. It was trained with 2,048 tokens.
    """
    usual = "max_position_embeddings"
    for key in (usual, "max_seq_len", "seq_length"):
        if getattr(config, key, None) is not None:
            return find_integer(file, config, key, MAX_POSITIONS)
    return (
        2048 if config.model_type == "bloom" else find_integer(file, config, usual, MAX_POSITIONS)
    )


def _rope_sections(file: ConfigFile, config: Any) -> list[ConfigFile]:
    """Return the keys of the rotary embeddings with a scaling that may extend the positions.

    Those of Gemma 3 include the scaling in ``max_position_embeddings``.
    """
    values = getattr(config, "rope_parameters", None) or {}
    if "gemma3" in config.model_type or not isinstance(values, dict):
        return []
    nested = [value for value in values.values() if isinstance(value, dict)]
    return [file.with_only().with_defaults(**section) for section in nested or [values]]


def _find_class(file: ConfigFile) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: set[str] = set()
    for classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known.update((classes,) if isinstance(classes, str) else classes)
    names = file.value("architectures")
    for name in names if isinstance(names, list) else ():
        if name in known:
            return str(name)
    if file.value("auto_map") is not None:
        raise file.error(
            "auto_map",
            f"names code in the checkpoint, which is never run; transformers has no "
            f"{shorten(names, quote=False)} that could take its place",
        )
    raise file.error(
        "architectures",
        f"is {shorten(names)}; supported are {', '.join(ARCHITECTURES)}, most causal language "
        "models of transformers, and encoders of the BERT family",
    )


def read_auto_config(checkpoint: Path, file: ConfigFile) -> Any:
    """Return transformers' configuration of a checkpoint; no code of the checkpoint is run.

    Raises:
        ConfigError: transformers does not know the model, or finds a value wrong.
    """
    from transformers import AutoConfig

    check_texts(checkpoint)
    check_sizes(file)
    try:
        config = AutoConfig.from_pretrained(
            str(checkpoint), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever its validation raises
        line = " ".join(str(error).split())
        raise ConfigError(f"{checkpoint / 'config.json'}: {shorten(line)}") from error
    return config


def find_integer(file: ConfigFile, config: Any, key: str, high: int, *, low: int = 1) -> int:
    """Return a size that transformers may read from a key of another name.

    Raises:
        ConfigError: it is missing, not an integer, below ``low`` or above ``high``.
    """
    values = {} if getattr(config, key, None) is None else {key: getattr(config, key)}
    return file.with_only().with_defaults(**values).integer(key, low=low, high=high)
