"""Reads everything that a checkpoint says about its decoder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from paged_backend.checkpoint.classifier import ClassifierSpec, read_activation
from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.defaults import with_family_defaults
from paged_backend.checkpoint.families.keys import rope_section
from paged_backend.checkpoint.gguf.config import read_gguf_config
from paged_backend.checkpoint.hub import is_gguf
from paged_backend.checkpoint.limits import MAX_END_TOKENS
from paged_backend.checkpoint.registry import find_architecture
from paged_backend.checkpoint.rope import Rope, read_rope
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.shape_reader import read_dtype, read_max_positions, read_shape
from paged_backend.checkpoint.size_limits import check_sizes
from paged_backend.checkpoint.text_part import text_part, warn_of_text_part
from paged_backend.values.errors import ConfigError
from paged_backend.values.options.generation import FILE_NAME
from paged_backend.values.validation import shorten

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """Sizes and variants of one decoder, and the numbers that it computes with."""

    rms_norm_eps: float
    ropes: tuple[Rope, ...]  # [num_layers]
    dtype: torch.dtype  # dtype of the checkpoint
    eos_token_ids: tuple[int, ...]  # any of them ends a generation
    file: ConfigFile  # config.json, for keys that only one family has; or a GGUF file as such
    classifier: ClassifierSpec | None = None  # the head of a reranker


def load_model_config(checkpoint: Path) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` if there is one, or a GGUF file's metadata.

    Raises:
        ConfigError: a file or key is missing or wrong, or the model is not supported.
    """
    config = _read_config(checkpoint)
    config = with_family_defaults(config, find_architecture(config))
    shape = read_shape(config)
    return ModelConfig(
        **{spec.name: getattr(shape, spec.name) for spec in fields(shape)},
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        ropes=_read_ropes(config, shape),
        dtype=DTYPES[read_dtype(config)],
        eos_token_ids=read_eos_token_ids(checkpoint, config, shape.vocab_size),
        file=config,
        classifier=ClassifierSpec(read_activation(config)) if shape.has_classifier else None,
    )


def _read_ropes(config: ConfigFile, shape: ModelShape) -> tuple[Rope, ...]:
    rotary = shape.variant.rotary
    sections = rotary.sections or (rope_section(config),) * shape.num_layers
    sizes = rotary.dim, read_max_positions(config)
    heads = [shape.sizes_of(layer).head_dim for layer in range(shape.num_layers)]
    places = [(id(section), size) for section, size in zip(sections, heads, strict=True)]
    known = {
        place: read_rope(section, place[1], *sizes)
        for place, section in dict(zip(places, sections, strict=True)).items()
    }
    return tuple(known[place] for place in places)


def _read_config(checkpoint: Path) -> ConfigFile:
    if is_gguf(checkpoint):
        return read_gguf_config(checkpoint)
    if not checkpoint.is_dir():
        raise ConfigError(f"model folder {checkpoint} does not exist")
    config = ConfigFile.read(checkpoint / "config.json")
    check_sizes(config)
    part = text_part(config)
    warn_of_text_part(config, part)
    return part


def read_eos_token_ids(checkpoint: Path, config: ConfigFile, vocab_size: int) -> tuple[int, ...]:
    """Read the tokens that end a generation, from `generation_config.json` if it has them."""
    sources = [config]
    if (checkpoint / FILE_NAME).exists():
        sources.insert(0, ConfigFile.read(checkpoint / FILE_NAME))
    for source in sources:
        ids = source.value("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if len(ids) > MAX_END_TOKENS:
            raise source.error("eos_token_id", f"must have at most {MAX_END_TOKENS} entries")
        if not all(type(token) is int for token in ids):
            raise source.error("eos_token_id", f"must be an integer or a list, got {shorten(ids)}")
        # Shrunk vocabularies keep ids that no longer exist; the model can never emit those.
        return tuple(token for token in ids if 0 <= token < vocab_size)
    return ()
