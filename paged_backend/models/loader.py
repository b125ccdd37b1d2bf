"""Builds a model for a platform and fills it from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from paged_backend.checkpoint.fallback_config import FallbackConfig
from paged_backend.checkpoint.hub import is_gguf
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.registry import ARCHITECTURES, tensors_of
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.shares import divide, shares_of
from paged_backend.checkpoint.stages import stage_of
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.checkpoint.tied_embeddings import (
    as_output_layer,
    only_output_layer,
    stored_untied,
)
from paged_backend.checkpoint.weights import load_weights, random_weights
from paged_backend.models.adapter_slots import AdapterSlots
from paged_backend.models.base import LoadableModel, Model
from paged_backend.models.division import ONE_RANK, Division, Group, Ranks
from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.models.layers import (
    LINEAR_METHODS,
    Kernels,
    LinearFactory,
    PlatformKernels,
    QuantizedKernels,
)
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.lora_kernels import LastMixing, LoraKernels
from paged_backend.models.quantized_experts import experts_quantized_online, quantized_experts
from paged_backend.models.quantized_linear import QuantizedLinear, quantized_linear
from paged_backend.models.rank_kernels import RankKernels
from paged_backend.models.stage_model import Divisible, StageModel
from paged_backend.models.stored_check import check_stored
from paged_backend.quantization.formats import Quantization, WeightFormat
from paged_backend.quantization.online import ONLINE_FORMATS
from paged_backend.quantization.read import check_option
from paged_backend.quantization.stored import usual_headers
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.model import ModelOptions
from paged_backend.values.validation import shorten

_PREDICTION_LAYER = "paged_backend.models.prediction:PredictionLayer"


def load_model(
    config: ModelOptions,
    model_config: ModelConfig,
    quantization: Quantization | None,
    folder: Path,
    kernels: PlatformKernels,
    ranks: Ranks = ONE_RANK,
    *,
    by_expert: bool = False,
    adapters: AdapterSlots | None = None,
    computes_all_rows: bool = False,
) -> Model:
    """Load the checkpoint in `folder`, or make random weights of its shape (`load_format`).

    Args:
        config: the engine's options.
        model_config: the checkpoint's config.json.
        quantization: how the checkpoint is quantized; None if it is not.
        folder: the checkpoint.
        kernels: the platform.
        ranks: the ranks that compute the model together.
        by_expert: each rank has some of the experts, and not a part of each of them.
        adapters: holds LoRA adapters of the model's layers; None for layers without any.
        computes_all_rows: the model is asked for the hidden states of all tokens in each step.

    Raises:
        ConfigError: the checkpoint cannot be used, or an option does not fit it.
    """
    model_kernels: Kernels = _quantized_kernels(config, quantization, kernels)
    max_model_len = decoder_max_model_len(config, model_config)
    renames = False
    # The header of a GGUF file has been compared with its tensors when it was read.
    if config.load_format != "dummy" and not is_gguf(folder):
        if model_config.tied_embeddings and stored_untied(folder):
            model_config = replace(model_config, tied_embeddings=False)
        check_stored(folder, model_config, quantization)
        renames = model_config.tied_embeddings and only_output_layer(usual_headers(folder))
    part, shares, division = model_config, None, None
    if (group := ranks.tensor) is not None:
        part = divide(model_config, group.size, by_expert=by_expert)
        shares = shares_of(model_config, part, group.rank, group.size, by_expert=by_expert)
        division = Division(group, shares, by_expert)
        model_kernels = RankKernels(model_kernels, division)
    if (pipeline := ranks.pipeline) is not None:
        part = replace(part, stage=stage_of(part.num_layers, pipeline.rank, pipeline.size))
    if adapters is not None:
        adapters.stage = part.stage
        last_mixing = None if computes_all_rows else LastMixing.of(part)
        model_kernels = LoraKernels(
            model_kernels, kernels.low_rank, adapters, last_mixing, division
        )
    model = build_model(part, max_model_len, model_kernels)
    parameters: Mapping[str, Parameter] = model.parameters()
    if config.load_format == "dummy":
        random_weights(parameters, tensors_of(model_config), config.seed, shares)
    else:
        parameters = as_output_layer(parameters) if renames else parameters
        load_weights(folder, parameters, shares, part.stage, model_config.needs)
    model.pack()
    return model if pipeline is None else _stage_model(model, model_config, pipeline, kernels)


def build_model(model_config: ModelConfig, max_model_len: int, kernels: Kernels) -> LoadableModel:
    """Create the model for the checkpoint's architecture; its weights are allocated, not loaded."""
    path = ARCHITECTURES[model_config.architecture].model
    module, _, name = (path if model_config.prediction is None else _PREDICTION_LAYER).partition(
        ":"
    )
    model: LoadableModel = getattr(import_module(module), name)(
        model_config, max_model_len, kernels
    )
    return model


def _stage_model(
    part: LoadableModel, config: ModelConfig, pipeline: Group, kernels: Kernels
) -> StageModel:
    if not isinstance(part, Divisible):  # only `build_model` of a registered family makes others
        problem = f"can only be 1 for {config.architecture}; got {pipeline.size}"
        raise option_error("pipeline_parallel_size", problem)
    return StageModel(part, config, pipeline, kernels.dtype, kernels.device)


def _quantized_kernels(
    config: ModelOptions, checkpoint: Quantization | None, kernels: PlatformKernels
) -> Kernels:
    """Return kernels that allocate quantized layers; the same kernels if none are quantized."""
    if checkpoint is not None:
        check_option(config.quantization, checkpoint)
        if config.load_format == "dummy":
            raise ConfigError(
                "option load_format can only be auto for a quantized checkpoint, got dummy"
            )
        return QuantizedKernels(
            kernels,
            lambda spec, platform: quantized_linear(spec, checkpoint, platform),
            lambda spec, platform: quantized_experts(spec, checkpoint.format_of, platform),
        )
    name = config.quantization
    if name is None:
        return kernels
    if name in LINEAR_METHODS:
        return _with_linear_method(name, kernels)
    if name in ONLINE_FORMATS:
        return _online(ONLINE_FORMATS[name], kernels)
    allowed = " or ".join(["null", *sorted(ONLINE_FORMATS | LINEAR_METHODS)])
    raise ConfigError(
        f"option quantization must be {allowed}, as the checkpoint is not quantized, got "
        f"{shorten(name)}"
    )


def _online(weight_format: WeightFormat, kernels: PlatformKernels) -> Kernels:
    """Return kernels that quantize the weights of a checkpoint as they are loaded."""

    def linear(spec: LinearSpec, platform: PlatformKernels) -> LinearMethod:
        return QuantizedLinear(spec, weight_format, platform)

    return QuantizedKernels(
        kernels,
        _unless_full_precision(linear),
        lambda spec, platform: experts_quantized_online(spec, weight_format, platform),
    )


def _with_linear_method(name: str, kernels: PlatformKernels) -> Kernels:
    """Return kernels with a registered linear method, which no experts can use."""

    def refuse(spec: ExpertsSpec, platform: PlatformKernels) -> ExpertsMethod:
        raise ConfigError(
            f"option quantization cannot be {name} for a model with experts ({spec.prefix})"
        )

    return QuantizedKernels(kernels, _unless_full_precision(LINEAR_METHODS[name]), refuse)


def _unless_full_precision(factory: LinearFactory) -> LinearFactory:
    """Return the factory, but for layers that no option quantizes."""

    def make(spec: LinearSpec, kernels: PlatformKernels) -> LinearMethod:
        return kernels.linear(spec) if spec.full_precision else factory(spec, kernels)

    return make


def decoder_max_model_len(config: ModelOptions, model: ModelShape | FallbackConfig) -> int:
    """Return the option `max_model_len` if it is set, else the model's default.

    Raises:
        ConfigError: the option exceeds the context length.
    """
    longest = resolve_max_model_len(config, model.max_position_embeddings)
    return longest if config.max_model_len is not None else model.default_max_model_len


def resolve_max_model_len(config: ModelOptions, limit: int) -> int:
    """Return the option `max_model_len` if it is set, else the model's context length `limit`.

    Raises:
        ConfigError: the option exceeds the context length.
    """
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"option max_model_len must be at most {limit} (the model's max_position_embeddings, "
            "which a rope_scaling of the type linear or yarn extends, and dynamic does not), got "
            f"{config.max_model_len}"
        )
    return config.max_model_len
