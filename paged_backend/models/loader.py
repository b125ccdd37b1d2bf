"""From an engine's options and a checkpoint's folder to a model that is ready to run."""

from __future__ import annotations

from pathlib import Path

import torch

from paged_backend.checkpoint.model_config import DTYPES, ModelConfig, load_model_config
from paged_backend.checkpoint.weights import load_weights, random_weights
from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError
from paged_backend.models.llama import LlamaModel


def load_model(config: EngineConfig, folder: Path, device: torch.device) -> LlamaModel:
    """Load the checkpoint in `folder`, or make random weights of its shape (`load_format`).

    Raises:
        ConfigError: the checkpoint cannot be used, or an option does not fit it.
    """
    model_config = load_model_config(folder)
    max_model_len = resolve_max_model_len(config, model_config)
    dtype = resolve_dtype(config.dtype, model_config.dtype, device)
    model = LlamaModel(model_config, max_model_len, dtype, device)
    if config.load_format == "dummy":
        random_weights(model.weight_slots(), config.seed)
    else:
        load_weights(folder, model.weight_slots())
    model.pack()
    return model


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """The option where it is set, else as many tokens as the model was made for.

    Raises:
        ConfigError: the option asks for more than that.
    """
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"option max_model_len must be at most {limit} (the model's "
            f"max_position_embeddings), got {config.max_model_len}"
        )
    return config.max_model_len


def resolve_dtype(option: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The option's dtype; `auto` is float32 on a CPU and the checkpoint's own elsewhere."""
    if option != "auto":
        return DTYPES[option]
    return torch.float32 if device.type == "cpu" else checkpoint
