"""Reads a checkpoint's configuration, and decides which kind of model it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from paged_backend.checkpoint.classifier import ClassifierSpec, ScoreFunction, parse_tokens
from paged_backend.checkpoint.encoder_config import (
    EncoderConfig,
    is_encoder,
    load_encoder_config,
)
from paged_backend.checkpoint.fallback_config import (
    FallbackConfig,
    load_fallback_config,
    uses_fallback,
)
from paged_backend.checkpoint.hub import resolve_tokenizer
from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.engine.decoders import StoredDecoder, StoredFallback
from paged_backend.engine.encoders import StoredEncoder
from paged_backend.engine.loaded_model import StoredModel
from paged_backend.text.tokenizer import load_end_token_id, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

Config = TypeVar("Config", ModelConfig, FallbackConfig, EncoderConfig)


def read_model(options: EngineConfig, folder: Path, tokenizer: Path | None) -> StoredModel:
    """Read the configuration of the checkpoint in `folder`.

    Args:
        options: the engine's options.
        folder: the checkpoint.
        tokenizer: folder or GGUF file of the tokenizer; its end token is added to the checkpoint's
            tokens that end a generation. None for no more tokens than these.

    Raises:
        ConfigError: the checkpoint cannot be used, or an option does not fit it.
    """
    if not uses_fallback(folder, options.model_impl):
        decoder = load_model_config(folder)
        if options.classifier_from_token is not None:
            decoder = _with_classifier(decoder, options)
        return StoredDecoder(options, folder, _with_end_token(decoder, tokenizer))
    if options.classifier_from_token is not None:
        raise ConfigError(
            "option classifier_from_token cannot be used with a model that transformers computes"
        )
    if is_encoder(folder):
        encoder = load_encoder_config(folder)
        return StoredEncoder(options, folder, _with_end_token(encoder, tokenizer))
    fallback = load_fallback_config(folder)
    return StoredFallback(options, folder, _with_end_token(fallback, tokenizer))


def _with_end_token(config: Config, tokenizer: Path | None) -> Config:
    """Return the model with one more token that ends a generation, if its vocabulary has it.

    Fine-tunes often have an end of turn that only their tokenizer names, in addition to the base
    model's generation_config.json. vLLM ends at both, too.
    """
    token_id = None if tokenizer is None else load_end_token_id(tokenizer)
    known: tuple[int, ...] = config.eos_token_ids
    if token_id is None or token_id in known or token_id >= config.vocab_size:
        return config
    return replace(config, eos_token_ids=(*known, token_id))


def _with_classifier(model: ModelConfig, options: EngineConfig) -> ModelConfig:
    """Return the model with a head that is made of its output layer."""
    option, variant = "option classifier_from_token", model.variant
    tokens = parse_tokens(options.classifier_from_token or "")
    if not model.has_output_layer:
        raise ConfigError(f"{option} cannot be used: the checkpoint has no output layer")
    if variant.logits_scale != 1 or variant.logits_softcap is not None:
        raise ConfigError(f"{option} cannot be used: {model.architecture} scales its logits")
    if options.load_format == "dummy":
        raise ConfigError(f"{option} cannot be used with load_format dummy")
    vocabulary = load_tokenizer(resolve_tokenizer(options))
    first, second = (vocabulary.token_id(token) for token in tokens)
    if first is None or second is None:
        missing = tokens[0] if first is None else tokens[1]
        raise ConfigError(f"{option}: {shorten(missing)} is not a token of the model's vocabulary")
    spec = ClassifierSpec(ScoreFunction.SIGMOID, (first, second))
    return replace(model, classifier=spec, has_output_layer=False, scores_by_tokens=True)
