"""What a checkpoint's config.json says about its decoder, checked and complete."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paged_backend.errors import ConfigError
from paged_backend.models.config_file import ConfigFile
from paged_backend.models.registry import Architecture, Biases, Windows, find_architecture
from paged_backend.models.rope import Rope, read_rope
from paged_backend.validation import shorten

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Settings that change the result and that the decoder lacks, each with the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and variants of one decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens of prompt and output that the model was made for
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool  # the output layer's weight is the embedding's
    biases: Biases
    qk_norm: bool  # queries and keys are normalised head by head
    windows: Windows  # [num_layers]
    dtype: torch.dtype  # of the checkpoint
    eos_token_ids: tuple[int, ...]  # any of them ends a generation


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` if there is one, from a checkpoint.

    Raises:
        ConfigError: a file or key is missing or wrong, or the model is not covered.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    config = ConfigFile.read(folder / "config.json")
    architecture = find_architecture(config)
    for key, off in _OFF.items():
        if config.value(key) not in off:
            raise config.error(key, f"is {shorten(config.value(key))}, which is not supported")
    num_heads = config.integer("num_attention_heads")
    head_dim = _head_dim(config, architecture, num_heads)
    num_layers = config.integer("num_hidden_layers")
    max_positions = config.integer("max_position_embeddings")
    vocab_size = config.integer("vocab_size")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, head_dim, max_positions),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        biases=architecture.biases(config),
        qk_norm=architecture.qk_norm,
        windows=architecture.windows(config, num_layers),
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(folder, config, vocab_size),
    )


def _head_dim(config: ConfigFile, architecture: Architecture, num_heads: int) -> int:
    hidden_size = config.integer("hidden_size")
    default = architecture.head_dim
    if default is None:
        if config.value("head_dim") is None and hidden_size % num_heads:
            raise config.error(
                "num_attention_heads", f"({num_heads}) must divide hidden_size ({hidden_size})"
            )
        default = hidden_size // num_heads
    head_dim = config.integer("head_dim", default)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even, got {head_dim}")
    return head_dim


def _num_kv_heads(config: ConfigFile, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads",
            f"({num_kv_heads}) must divide num_attention_heads ({num_heads})",
        )
    return num_kv_heads


def _dtype(config: ConfigFile) -> torch.dtype:
    key = "dtype" if "dtype" in config else "torch_dtype"
    return DTYPES[config.text(key, "float32", DTYPES)]


def _eos_token_ids(folder: Path, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.insert(0, ConfigFile.read(folder / "generation_config.json"))
    for source in sources:
        ids = source.value("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in ids):
            raise source.error("eos_token_id", f"must be an integer or a list, got {shorten(ids)}")
        # Shrunk vocabularies keep ids that no longer exist; the model can never emit those.
        return tuple(token for token in ids if 0 <= token < vocab_size)
    return ()
