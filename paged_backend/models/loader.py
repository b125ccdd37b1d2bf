"""Builds a model for a platform and fills it from a checkpoint."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.registry import ARCHITECTURES, tensors_of
from paged_backend.checkpoint.weights import load_weights, random_weights
from paged_backend.errors import ConfigError
from paged_backend.models.base import Model
from paged_backend.models.layers import LINEAR_METHODS, Kernels, LinearFactory, QuantizedKernels
from paged_backend.models.quantized_linear import QuantizedLinear, quantized_linear
from paged_backend.options.model import ModelOptions
from paged_backend.quantization.formats import Quantization, WeightFormat
from paged_backend.quantization.online import ONLINE_FORMATS
from paged_backend.quantization.read import check_option
from paged_backend.validation import shorten


def load_model(
    config: ModelOptions,
    model_config: ModelConfig,
    quantization: Quantization | None,
    folder: Path,
    kernels: Kernels,
) -> Model:
    """Load the checkpoint in `folder`, or make random weights of its shape (`load_format`).

    Args:
        config: the engine's options.
        model_config: the checkpoint's config.json.
        quantization: how the checkpoint is quantized; None if it is not.
        folder: the checkpoint.
        kernels: the platform.

    Raises:
        ConfigError: the checkpoint cannot be used, or an option does not fit it.
    """
    factory = _linear_factory(config, quantization)
    if factory is not None:
        kernels = QuantizedKernels(kernels, factory)
    model = build_model(model_config, resolve_max_model_len(config, model_config), kernels)
    if config.load_format == "dummy":
        random_weights(model.parameters(), tensors_of(model_config), config.seed)
    else:
        load_weights(folder, model.parameters())
    model.pack()
    return model


def build_model(model_config: ModelConfig, max_model_len: int, kernels: Kernels) -> Model:
    """Create the model for the checkpoint's architecture; its weights are allocated, not loaded."""
    module, _, name = ARCHITECTURES[model_config.architecture].model.partition(":")
    model: Model = getattr(import_module(module), name)(model_config, max_model_len, kernels)
    return model


def _linear_factory(config: ModelOptions, checkpoint: Quantization | None) -> LinearFactory | None:
    """Return what creates quantized layers; None if none are."""
    if checkpoint is not None:
        check_option(config.quantization, checkpoint)
        if config.load_format == "dummy":
            raise ConfigError(
                "option load_format can only be auto for a quantized checkpoint, got dummy"
            )
        return lambda spec, kernels: quantized_linear(spec, checkpoint, kernels)
    if config.quantization is None:
        return None
    factories = {name: _online(kind) for name, kind in ONLINE_FORMATS.items()} | LINEAR_METHODS
    if config.quantization not in factories:
        allowed = " or ".join(["null", *sorted(factories)])
        raise ConfigError(
            f"option quantization must be {allowed}, as the checkpoint is not quantized, got "
            f"{shorten(config.quantization)}"
        )
    return factories[config.quantization]


def _online(weight_format: WeightFormat) -> LinearFactory:
    """Create layers that quantize the weights of a checkpoint as they are loaded."""
    return lambda spec, kernels: QuantizedLinear(spec, weight_format, kernels)


def resolve_max_model_len(config: ModelOptions, model_config: ModelConfig) -> int:
    """Return the option `max_model_len` if it is set, else the model's context length.

    Raises:
        ConfigError: the option exceeds the context length (`max_position_embeddings`).
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
