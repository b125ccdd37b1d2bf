"""Loads the multi-token prediction (MTP) layer of a checkpoint (speculative decoding)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paged_backend.checkpoint.hub import is_gguf
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.prediction import prediction_layer
from paged_backend.models.decoder import Decoder
from paged_backend.models.division import Ranks
from paged_backend.models.hidden_states import HiddenStates
from paged_backend.models.loader import load_model
from paged_backend.models.prediction import PredictionLayer
from paged_backend.platforms.base import Platform
from paged_backend.quantization.formats import Quantization
from paged_backend.quantization.stored import usual_headers
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.speculation import MTP


@dataclass(frozen=True, slots=True)
class StoredTarget:
    """The checkpoint of the model that is guessed for.

    Attributes:
        folder: the checkpoint.
        config: its configuration.
        quantization: how it is quantized; None if it is not.
    """

    folder: Path
    config: ModelConfig
    quantization: Quantization | None


def uses_prediction_layer(options: EngineConfig) -> bool:
    """Return whether the options ask for the MTP layer."""
    speculation = options.speculation()
    return speculation is not None and speculation.method == MTP


def check_prediction_layer(options: EngineConfig, stored: StoredTarget | None) -> None:
    """Check that a checkpoint has one MTP layer, if the options ask for it.

    Args:
        options: the engine's options.
        stored: the checkpoint; None if transformers computes the model.

    Raises:
        ConfigError: it has no such layer, or more than one.
    """
    if not uses_prediction_layer(options):
        return
    if stored is None:
        raise refuse_method(MTP, "transformers computes the model")
    config = _config_of(stored)
    if options.load_format == "dummy" or is_gguf(stored.folder):
        return
    names = config.prediction
    assert names is not None
    if not any(map(names.has, usual_headers(stored.folder))):
        raise refuse_method(
            MTP, f"config.json names an MTP layer, but the files have no {names.layer}"
        )


def load_prediction_layer(
    options: EngineConfig,
    platform: Platform,
    target: Decoder,
    stored: StoredTarget,
    ranks: Ranks,
) -> tuple[PredictionLayer, HiddenStates]:
    """Load the MTP layer; returns it with the hidden states that it reads.

    Args:
        options: the engine's options.
        platform: where it computes.
        target: the model.
        stored: the checkpoint of the model.
        ranks: the ranks that compute the model together.

    Raises:
        ConfigError: the checkpoint has no such layer, or its tensors cannot be used.
    """
    config = _config_of(stored)
    try:
        layer = load_model(
            *(options, config, stored.quantization, stored.folder, platform, ranks),
            by_expert=options.enable_expert_parallel,
        )
    except ConfigError as error:
        raise refuse_method(MTP, str(error)) from error
    assert isinstance(layer, PredictionLayer)
    size = config.hidden_size
    hidden = HiddenStates(options.block_size, size, platform.dtype, platform.device)
    layer.read_from(target, hidden)
    return layer, hidden


def refuse_method(method: str, reason: str) -> ConfigError:
    """Return the error for a method of speculation that the model cannot have."""
    return option_error("speculative_config.method", f"cannot be {method}: {reason}")


def _config_of(stored: StoredTarget) -> ModelConfig:
    config = prediction_layer(stored.config)
    if config is None:
        raise refuse_method(
            MTP, "the checkpoint must have exactly one MTP layer, see docs/speculation.md"
        )
    return config
