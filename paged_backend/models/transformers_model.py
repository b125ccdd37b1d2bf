"""Models that transformers computes, with attention over the paged KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paged_backend.checkpoint.fallback_config import FallbackConfig
from paged_backend.checkpoint.shape import Windows
from paged_backend.checkpoint.stages import Stage, stage_of
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.division import ONE_RANK, Division, Group, Ranks
from paged_backend.models.loader import decoder_max_model_len
from paged_backend.models.rank_kernels import RankKernels
from paged_backend.models.states import StateLayer
from paged_backend.models.transformers_adapters import (
    adapt,
    adapters_of,
    prepare_falcon,
)
from paged_backend.models.transformers_attention import NAME, LayerFinder, PagedStep, attend_with
from paged_backend.models.transformers_check import (
    AttentionKernels,
    check_prompts,
    check_rope,
    compare,
    paged_logits,
)
from paged_backend.models.transformers_division import plan_shares
from paged_backend.models.transformers_linear import (
    LINEAR_CLASSES,
    replace_linear_layers,
    watch_linear_layers,
)
from paged_backend.models.transformers_loading import (
    check_not_quantized,
    load_pretrained,
    refuse_tensors,
    tensor_names,
)
from paged_backend.models.transformers_stages import check_plan, keep_stage
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.model import ModelOptions
from paged_backend.values.validation import shorten

# What code of a model raises that finds other layers or arguments than it expects.
_MISUSES = ValueError, TypeError, LookupError, AttributeError


class TransformersModel:
    """See :class:`~paged_backend.models.base.Model`; `forward` returns logits."""

    head = None

    def __init__(self, config: FallbackConfig, max_model_len: int, model: Any) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.attention_layers: Sequence[AttentionLayer] = ()
        self.state_layers: Sequence[StateLayer] = ()
        self.windows: Windows = ()
        self._model = model
        self._layers: Sequence[AttentionLayer] = ()
        self._pipeline: Group | None = None
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def own_logits(self, prompt: Tensor) -> Tensor:
        """Compute the logits [tokens, vocab_size] of a prompt with the model's own attention.

        This is possible until the layers are found.
        """
        ids = prompt[None].to(self._model.device)
        logits: Tensor = self._model(ids, use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def find_layers(self) -> None:
        """Find the attention layers by a forward pass."""
        finder = LayerFinder(self.max_model_len)
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self._model.device)
        forwards = adapters_of(type(self._model).__name__)
        if forwards is None:
            self._model.set_attn_implementation(NAME)
        else:
            adapt(self._model, forwards)
            self._model.config._attn_implementation = NAME
        with attend_with(finder):
            self._call(tokens, torch.arange(2, device=tokens.device))
        layers = finder.layers(self._model.config.get_text_config(decoder=True))
        self._layers = layers
        self.attention_layers = [layer for layer in layers if layer.keeps_tokens]
        self.windows = tuple(layer.window for layer in layers)

    def divide(self, stage: Stage, pipeline: Group) -> None:
        """Keep the layers of a stage only; the layers have been found before."""
        keep_stage(self._model, stage, pipeline)
        self._pipeline = pipeline
        self.attention_layers = [self._layers[index] for index in stage.layers]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Compute logits [num_rows, vocab_size], see `Model.forward`."""
        options: dict[str, Any] = {}
        if self._keeps_rows and logits_indices is not None:
            options["logits_to_keep"] = logits_indices
        with attend_with(PagedStep(attention, meta, self._layers)):
            logits = self._call(input_ids.unsqueeze(0), meta.positions, **options)
        if self._keeps_rows or logits_indices is None:
            return logits
        return logits[logits_indices]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that `forward` has computed, in the last stage if there are several."""
        if self._pipeline is None:
            return hidden
        logits = hidden.contiguous()
        self._pipeline.broadcast(logits, self._pipeline.size - 1)
        return logits

    def _call(self, input_ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
        output = self._model(
            input_ids=input_ids.long(),
            position_ids=positions.long().unsqueeze(0),
            use_cache=False,
            **options,
        )
        logits: Tensor = output.logits[0]
        return logits


def load_transformers_model(
    options: ModelOptions,
    config: FallbackConfig,
    folder: Path,
    kernels: AttentionKernels,
    ranks: Ranks = ONE_RANK,
) -> TransformersModel:
    """Load the checkpoint in `folder` with transformers, and connect it to the paged KV cache.

    Before the model serves, its logits through the paged cache, in chunks and with another
    sequence, are compared with the logits that transformers computes without this cache. Each of
    several ranks loads the whole model first. Then the model is divided, and its logits are
    compared with those before.

    Raises:
        ConfigError: transformers cannot load it, or it cannot use the paged KV cache.
    """
    check_not_quantized(options, folder, config.file)
    model = load_pretrained(config.architecture, options, folder, kernels, _check_complete)
    _check_kind(model)
    max_model_len = decoder_max_model_len(options, config)
    check_rope(model.config.get_text_config(decoder=True), config.architecture, max_model_len)
    loaded = TransformersModel(config, max_model_len, model)
    prepare_falcon(model)
    prompts = check_prompts(config.vocab_size, max_model_len)
    group, pipeline = ranks.tensor, ranks.pipeline
    if pipeline is not None:
        check_plan(model, pipeline)
    shares = None if group is None else plan_shares(model, LINEAR_CLASSES, group)
    division = None if group is None or shares is None else Division(group, shares)
    layer_kernels = kernels if division is None else RankKernels(kernels, division)
    try:
        with watch_linear_layers(model) as called:
            whole = loaded.own_logits(prompts[1])
        replace_linear_layers(model, called.groups(), layer_kernels, shares)
        expected = [loaded.own_logits(prompt) for prompt in prompts]
        loaded.find_layers()
        actual = paged_logits(loaded, prompts, kernels)
    except ConfigError:
        raise
    except (RuntimeError, *_MISUSES) as error:
        raise _refused("the model cannot use the paged KV cache", error) from error
    exact = kernels.dtype == kernels.kv_dtypes[0] == torch.float32
    compare(expected, actual, "the model cannot use the paged KV cache: its logits", exact=exact)
    if division is not None:
        problem = "option tensor_parallel_size can only be 1 for this model: its logits"
        compare([whole], [expected[1]], problem, exact=exact)
    if pipeline is not None:
        if len(loaded.attention_layers) < len(loaded.windows):
            raise option_error(
                "pipeline_parallel_size", "can only be 1 for a model with layers that share keys"
            )
        problem = "option pipeline_parallel_size can only be 1 for this model"
        loaded.divide(stage_of(len(loaded.windows), pipeline.rank, pipeline.size), pipeline)
        try:
            parts = paged_logits(loaded, prompts, kernels)
            divided = [loaded.compute_logits(part) for part in parts]
        except _MISUSES as error:
            raise _refused(problem, error) from error
        compare(expected, divided, f"{problem}: its logits", exact=exact)
    return loaded


def _refused(problem: str, error: Exception) -> ConfigError:
    return ConfigError(f"{problem}: {shorten(' '.join(str(error).split()))}")


def _check_complete(folder: Path, model: Any, info: dict[str, Any]) -> None:
    for problem in ("missing", "mismatched", "unexpected"):
        refuse_tensors(folder, problem, tensor_names(info, problem))


def _check_kind(model: Any) -> None:
    """Refuse models with state or attention that is known not to be in a KV cache."""
    config = model.config.get_text_config(decoder=True)
    reasons = {
        "it has a recurrent state": getattr(model, "_is_stateful", False),
        "it computes attention by itself": not getattr(model, "_supports_attention_backend", False)
        and adapters_of(type(model).__name__) is None,
        "it attends to chunks": getattr(config, "attention_chunk_size", None) is not None,
        "it has an encoder": getattr(config, "is_encoder_decoder", False),
    }
    for reason, applies in reasons.items():
        if applies:
            name = type(model).__name__
            raise ConfigError(f"{name} cannot use the paged KV cache: {reason}")
