"""Loads the draft model of a decoder, which guesses its next tokens (speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paged_backend.checkpoint.fallback_config import uses_fallback
from paged_backend.checkpoint.hub import resolve_model, resolve_tokenizer
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheSpec, kv_cache_format
from paged_backend.models.loader import load_model
from paged_backend.platforms.base import Platform
from paged_backend.quantization.read import read_quantization
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.kv_cache_groups import KVCacheGroup, KVCacheLayout
from paged_backend.values.options.model import AUTO
from paged_backend.values.options.speculation import DRAFT_MODEL
from paged_backend.values.validation import shorten

_OPTION = "speculative_config.model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model with weights, and the shape of its keys and values."""

    model: Model
    spec: KVCacheSpec


def load_draft_model(
    options: EngineConfig, platform: Platform, target: Model, layout: KVCacheLayout
) -> DraftModel | None:
    """Load the draft model that the options name; None if they name none.

    All of its layers use the block table of one group without a window.

    Args:
        options: the engine's options.
        platform: where both models compute.
        target: the model that it guesses for.
        layout: the groups of the block tables.

    Raises:
        ConfigError: the draft model cannot be loaded or does not fit the model.
    """
    speculation = options.speculation()
    if speculation is None or speculation.method != DRAFT_MODEL:
        return None
    assert speculation.model is not None
    if None not in layout.windows:
        raise option_error(
            "speculative_config.method",
            f"cannot be {DRAFT_MODEL}: all layers of the model have a window",
        )
    folder = resolve_model(
        speculation.model,
        None,
        options.download_dir,
        weights=options.load_format != "dummy",
        role="draft model",
    )
    if uses_fallback(folder, AUTO):
        raise option_error(
            _OPTION, f"{shorten(speculation.model)} cannot be used: transformers computes it"
        )
    config = load_model_config(folder)
    if config.variant.state_mixers:
        problem = "cannot be used: some of its layers keep a state for each sequence"
        raise option_error(_OPTION, f"{shorten(speculation.model)} {problem}")
    _check_tokens(options, speculation.model, folder, config.vocab_size, target.config.vocab_size)
    quantization = read_quantization(folder, config.file)
    own = replace(
        options,
        model=speculation.model,
        revision=None,
        max_model_len=target.max_model_len,
        quantization=None,
    )
    try:
        model = load_model(own, config, quantization, folder, platform)
    except ConfigError as error:
        raise ConfigError(f"{_OPTION} {shorten(speculation.model)}: {error}") from error
    layers = model.attention_layers
    group = KVCacheGroup(None, tuple(layer.index for layer in layers))
    stored = kv_cache_format(options.kv_cache_dtype, layers, platform.kv_dtypes)
    return DraftModel(
        model, KVCacheSpec.of(layers, options.block_size, stored, target.max_model_len, (group,))
    )


def _check_tokens(
    options: EngineConfig, name: str, folder: Path, vocab_size: int, target_size: int
) -> None:
    """Check that a draft model has the tokens of the model.

    Raises:
        ConfigError: it has others, or has more or fewer of them.
    """
    needed = f"{shorten(name)} must have the tokenizer of the model {shorten(options.model)}"
    if vocab_size != target_size:
        raise option_error(
            _OPTION, f"{needed}; their vocabularies have {vocab_size} and {target_size} tokens"
        )
    draft, target = (_tokenizer(path) for path in (folder, resolve_tokenizer(options)))
    if draft is not None and target is not None and not draft.has_tokens_of(target):
        raise option_error(_OPTION, f"{needed}; some of their tokens differ")


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint; None if it has none that can be read."""
    try:
        return load_tokenizer(folder)
    except ConfigError:
        return None
