"""Decides what a model is loaded for: to generate tokens, or to make embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.gguf.config import GGUF_POOLING
from paged_backend.checkpoint.sentence_transformers import has_modules, read_pooling
from paged_backend.values.errors import ConfigError
from paged_backend.values.options.model import AUTO, GENERATE, POOLING, SCORE, ModelOptions
from paged_backend.values.pooling_params import Pooling, PoolingType
from paged_backend.values.validation import shorten

# By llama.cpp's numbers. It normalizes embeddings unless a client asks for others.
_GGUF_TYPES = {0: None, 1: PoolingType.MEAN, 2: PoolingType.CLS, 3: PoolingType.LAST}


class PooledModel(Protocol):
    """The facts about a model that decide on its task."""

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        ...

    @property
    def has_output_layer(self) -> bool:
        """Return True if the model can compute logits."""
        ...

    @property
    def file(self) -> ConfigFile:
        """The checkpoint's config.json or GGUF file."""
        ...


def resolve_task(
    config: ModelOptions,
    checkpoint: Path,
    model: PooledModel,
    default: PoolingType = PoolingType.LAST,
) -> Pooling | None:
    """Return how a model makes embeddings; None if it generates tokens.

    By default, checkpoints that say how they are pooled and checkpoints without an output layer
    make embeddings.

    Args:
        config: the engine's options.
        checkpoint: the checkpoint.
        model: what the checkpoint's config.json or GGUF file says.
        default: pooling of checkpoints that do not say how they are pooled; they normalize. vLLM's
            defaults are the last token for decoders, and the first one for encoders.

    Raises:
        ConfigError: the checkpoint cannot do what the options ask for.
    """
    if config.task == SCORE:
        raise ConfigError(
            "option task can only be score for a reranker: a checkpoint of an architecture "
            "...ForSequenceClassification, or with the option classifier_from_token"
        )
    if config.task == GENERATE:
        _check_generates(config, checkpoint, model)
        return None
    pooling = _read_pooling(checkpoint, model)
    if config.task == AUTO and pooling is None and model.has_output_layer:
        _check_generates(config, checkpoint, model)
        return None
    pooling = pooling or Pooling(default, normalize=True)
    if config.pooling_type is not None:
        pooling = pooling._replace(kind=PoolingType(config.pooling_type))
    if config.normalize is not None:
        pooling = pooling._replace(normalize=config.normalize)
    return pooling


def resolve_scoring(config: ModelOptions, kind: PoolingType) -> Pooling:
    """Return how a reranker is pooled.

    Args:
        config: the engine's options.
        kind: the hidden states that the head reads.

    Raises:
        ConfigError: the options ask for something else.
    """
    if config.task not in (AUTO, SCORE, POOLING):
        raise ConfigError(
            f"option task must be auto, score or pooling for a reranker, got {config.task}"
        )
    for name, value in (("pooling_type", config.pooling_type), ("normalize", config.normalize)):
        if value is not None:
            raise ConfigError(f"option {name} cannot be used with a reranker")
    return Pooling(kind, normalize=False)


def _read_pooling(checkpoint: Path, model: PooledModel) -> Pooling | None:
    """Return how a checkpoint is pooled; None if it does not say."""
    if has_modules(checkpoint):
        return read_pooling(checkpoint, model.hidden_size)
    number = model.file.value(GGUF_POOLING)
    if number is not None and (type(number) is not int or number not in _GGUF_TYPES):
        known = ", ".join(map(str, _GGUF_TYPES))
        raise model.file.error("pooling_type", f"must be one of {known}; got {shorten(number)}")
    kind = None if number is None else _GGUF_TYPES[number]
    return None if kind is None else Pooling(kind, normalize=True)


def _check_generates(config: ModelOptions, checkpoint: Path, model: PooledModel) -> None:
    if not model.has_output_layer:
        raise ConfigError(
            f"option task must be auto or embed: {checkpoint} has no output layer that "
            "predicts the next token (language-model head), so it cannot generate"
        )
    for name, value in (("pooling_type", config.pooling_type), ("normalize", config.normalize)):
        if value is not None:
            raise ConfigError(
                f"option {name} can only be used with task embed; this model generates"
            )
