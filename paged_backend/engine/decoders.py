"""Decoders: those that we compute, and those that transformers computes over our KV cache."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from paged_backend.checkpoint.fallback_config import FallbackConfig
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.stages import problem_of_stages
from paged_backend.checkpoint.task import resolve_scoring, resolve_task
from paged_backend.engine.draft_models import load_draft_model
from paged_backend.engine.loaded_model import (
    LoadedModel,
    check_whole_prompts_fit,
    refuse_stages,
)
from paged_backend.engine.prediction_layers import (
    StoredTarget,
    check_prediction_layer,
    uses_prediction_layer,
)
from paged_backend.engine.state_pool import sized, state_layout
from paged_backend.models.adapter_slots import AdapterSlots
from paged_backend.models.attention import CachedLayer
from paged_backend.models.base import Model
from paged_backend.models.division import ONE_RANK, Ranks
from paged_backend.models.kv_cache import KVCacheSpec, kv_cache_format
from paged_backend.models.loader import decoder_max_model_len, load_model
from paged_backend.models.positions import check_positions
from paged_backend.models.states import StateSpec
from paged_backend.models.step_context import StepContext
from paged_backend.platforms.base import ModelRunner, Platform
from paged_backend.platforms.drafting_runner import DraftingRunner
from paged_backend.quantization.read import read_quantization
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.kv_cache_groups import (
    NO_LAYERS,
    KVCacheGroup,
    KVCacheLayout,
    KVSizes,
    group_layers_of_stage,
    num_empty_blocks,
)
from paged_backend.values.options.model import AUTO, GENERATE
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.pooling_params import Pooling, PoolingType
from paged_backend.values.windows import Window


@dataclass(frozen=True, slots=True)
class StoredDecoder:
    """A decoder of a family that has an implementation of ours; see `StoredModel`."""

    options: EngineConfig
    folder: Path
    config: ModelConfig

    @property
    def is_reranker(self) -> bool:
        """Whether the model scores pairs of texts."""
        return self.config.classifier is not None

    def pooling(self) -> Pooling | None:
        """Return how the model makes embeddings or scores; None if it generates."""
        if self.is_reranker:
            return resolve_scoring(self.options, PoolingType.LAST)
        return resolve_task(self.options, self.folder, self.config)

    def load(
        self,
        platform: Platform,
        limits: StepLimits,
        pooling: Pooling | None,
        ranks: Ranks = ONE_RANK,
    ) -> LoadedModel:
        """Load the weights, size the KV pool and make the model runner."""
        options, config = self.options, self.config
        quantization = read_quantization(self.folder, config.file)
        stored = StoredTarget(self.folder, config, quantization)
        check_prediction_layer(options, stored)
        max_model_len = decoder_max_model_len(options, config)
        pool_bytes = options.kv_cache_memory_bytes or platform.default_kv_cache_bytes
        if pool_bytes is not None:
            check_positions(config, max_model_len, pool_bytes)
        if self.is_reranker:
            refuse_stages(ranks, "for a model that scores pairs of texts")
        if config.variant.layer_inputs is not None:
            refuse_stages(ranks, "for a model with inputs of layers")
        if config.variant.shared_blocks is not None:
            refuse_stages(ranks, "for a model with blocks that layers share")
            if options.enable_lora:
                reason = "can only be false for a model with blocks that layers share"
                raise option_error("enable_lora", reason)
        if config.keeping_layers != config.attention_layers:
            refuse_stages(ranks, "for a model with layers that share keys and values")
        layers = _Layers.of(config)
        if ranks.pipeline is not None:
            problem = problem_of_stages(
                list(layers.windows), config.num_layers, ranks.pipeline.size
            )
            if problem is not None:
                raise option_error("pipeline_parallel_size", problem)
        has_output_layer = config.has_output_layer and pooling is None
        config = replace(config, has_output_layer=has_output_layer)
        by_expert = options.enable_expert_parallel
        adapters = _adapter_slots(options, limits, platform.device)
        model = load_model(
            options,
            config,
            quantization,
            self.folder,
            platform,
            ranks,
            by_expert=by_expert,
            adapters=adapters,
            computes_all_rows=uses_prediction_layer(options),
        )
        return _with_kv_pool(model, platform, limits, options, stored, ranks, layers, adapters)


@dataclass(frozen=True, slots=True)
class StoredFallback:
    """A decoder that transformers computes; see `StoredModel`."""

    options: EngineConfig
    folder: Path
    config: FallbackConfig

    @property
    def is_reranker(self) -> bool:
        """False: it can only generate."""
        return False

    def pooling(self) -> Pooling | None:
        """Return None: it can only generate."""
        options = self.options
        if options.enable_lora:
            raise option_error(
                "enable_lora",
                f"can only be false for {self.config.architecture}, which transformers computes",
            )
        asks_for_task = options.task not in (AUTO, GENERATE)
        if asks_for_task or options.pooling_type is not None or options.normalize is not None:
            raise ConfigError(
                f"options task, pooling_type and normalize cannot ask for embeddings: transformers "
                f"computes {self.config.architecture}, which can only generate"
            )
        return None

    def load(
        self,
        platform: Platform,
        limits: StepLimits,
        pooling: Pooling | None,
        ranks: Ranks = ONE_RANK,
    ) -> LoadedModel:
        """Load the weights, size the KV pool and make the model runner."""
        from paged_backend.models.transformers_model import load_transformers_model

        check_prediction_layer(self.options, None)
        if ranks.tensor is not None and self.options.enable_expert_parallel:
            raise option_error(
                "enable_expert_parallel",
                "can only be false for a model that transformers computes; got true",
            )
        model = load_transformers_model(self.options, self.config, self.folder, platform, ranks)
        options = replace(self.options, enforce_eager=True)  # not all of its code can be captured
        layers = _Layers(dict(enumerate(model.windows)))
        return _with_kv_pool(model, platform, limits, options, None, ranks, layers)


class _Layers(NamedTuple):
    """All layers of a model that keep something for tokens, of all stages.

    Attributes:
        windows: the window of each of them, by its number.
        kept: what each of them keeps for a token, in the same order; None if all keep the same.
        with_states: whether some layers, possibly of other stages, keep states of sequences.
    """

    windows: Mapping[int, Window | None]
    kept: Sequence[KVSizes] | None = None
    with_states: bool = False

    @classmethod
    def of(cls, shape: ModelShape) -> _Layers:
        """Return the layers of a model."""
        keeping = shape.keeping_layers
        return cls(
            {layer: shape.windows[layer] for layer in keeping},
            list(map(shape.kept_of, keeping)),
            any(mixer is not None for mixer in shape.variant.state_mixers),
        )

    def groups_of_stage(
        self, max_model_len: int, layers: Sequence[CachedLayer]
    ) -> tuple[KVCacheGroup, ...]:
        """Return the groups of the layers of a stage; see `group_layers_of_stage`.

        Args:
            max_model_len: maximum number of tokens of a sequence.
            layers: the layers with attention of this stage.
        """
        if not self.windows:
            return NO_LAYERS
        numbers = list(self.windows)
        places = range(numbers.index(layers[0].index), numbers.index(layers[-1].index) + 1)
        windows = list(self.windows.values())
        groups = group_layers_of_stage(windows, max_model_len, places, self.kept)
        return tuple(
            KVCacheGroup(group.window, tuple(numbers[place] for place in group.layers))
            for group in groups
        )


def _with_kv_pool(
    model: Model,
    platform: Platform,
    limits: StepLimits,
    options: EngineConfig,
    stored: StoredTarget | None,
    ranks: Ranks,
    all_layers: _Layers,
    adapters: AdapterSlots | None = None,
) -> LoadedModel:
    """Size the KV pool of a model with weights, and make its model runner.

    Args:
        model: the model.
        platform: where it computes.
        limits: limits of a step.
        options: the engine's options.
        stored: its checkpoint; None if transformers computes it.
        ranks: the ranks, which get equal numbers of blocks.
        all_layers: all layers that keep something for tokens, also of other stages.
        adapters: holds the LoRA adapters; None for a model without any.
    """
    loaded_s, max_model_len = time.monotonic(), model.max_model_len
    quantization = None if stored is None else stored.quantization
    if not options.enable_chunked_prefill:
        check_whole_prompts_fit(limits, max_model_len, "without chunked prefill")
    kv_dtype, alone = options.kv_cache_dtype, not all_layers.windows
    if kv_dtype == "auto" and quantization is not None and not alone:
        kv_dtype = quantization.kv_cache_dtype
    layers = model.attention_layers
    kv_format = kv_cache_format(kv_dtype, layers, platform.kv_dtypes)
    groups = None
    if ranks.pipeline is not None:
        groups = all_layers.groups_of_stage(max_model_len, layers)
    spec = KVCacheSpec.of(layers, options.block_size, kv_format, max_model_len, groups)
    layout = KVCacheLayout(
        options.block_size,
        limits.max_num_batched_tokens,
        tuple(group.window for group in spec.groups),
    )
    if model.state_layers:
        spec = replace(spec, states=StateSpec(tuple(model.state_layers)))
    of_model = replace(options, kv_cache_dtype=kv_dtype)
    draft = load_draft_model(of_model, platform, model, layout, stored, ranks)
    run = model if draft is None else draft.recorded(model, layout)
    models = [(run, spec)] + ([] if draft is None else [(draft.model, draft.spec)])
    empty = alone and draft is None  # blocks take no memory
    budget = options.kv_cache_memory_bytes or platform.kv_cache_bytes(models, limits, options)
    if all_layers.with_states:
        states = sized(model.state_layers, budget, limits, ranks, platform.device, alone=empty)
        spec = replace(spec, states=states)
        budget -= states.num_bytes
        chunks = platform.state_chunks
        layout = replace(layout, states=state_layout(states.num_slots, options, limits, chunks))
    if empty and layout.states is not None:
        num_blocks = num_empty_blocks(layout, layout.states.num_slots, max_model_len)
    else:
        block_bytes = spec.bytes_per_block + (0 if draft is None else draft.bytes_per_block)
        room = torch.tensor([budget, block_bytes], device=platform.device)
        num_blocks = _num_blocks(layout, ranks.gather(room), max_model_len)
    context = None if adapters is None else adapters.context
    if draft is not None and draft.hidden is not None:
        draft.hidden.resize(num_blocks)
    runner: ModelRunner = platform.model_runner(run, spec, num_blocks, limits, options, context)
    if draft is not None:
        # The texts of the model say where the passes of the draft model begin.
        without_texts = replace(limits, draws_ahead=False)
        drafts = platform.model_runner(draft.model, draft.spec, num_blocks, without_texts, options)
        runner = DraftingRunner(runner, drafts, layout, draft.hidden)
    return LoadedModel(
        model=model,
        max_model_len=max_model_len,
        quantization=options.quantization if quantization is None else quantization.method,
        runner=runner,
        step_limits=limits,
        kv_cache="" if alone else str(kv_format),
        kv_bytes_per_token=spec.bytes_per_token + (0 if draft is None else draft.bytes_per_token),
        kv_layout=layout,
        num_blocks=num_blocks,
        loaded_s=loaded_s,
        adapters=adapters,
        draft_weights=None if draft is None else draft.weights,
    )


def _adapter_slots(
    options: EngineConfig, limits: StepLimits, device: torch.device
) -> AdapterSlots | None:
    """Return the slots of LoRA adapters that the options ask for."""
    if not options.enable_lora:
        return None
    # Several completions can begin after one row, and each has a row behind the last attention.
    context = StepContext(limits.max_num_batched_tokens + limits.max_num_seqs, device)
    return AdapterSlots(context, options.num_adapters_in_memory, options.max_lora_rank)


def _num_blocks(layout: KVCacheLayout, rooms: torch.Tensor, max_model_len: int) -> int:
    """Return the number of blocks that all ranks have room for.

    Args:
        layout: the groups of the block tables.
        rooms: [num_ranks, 2] the bytes of the pool and of a block, for each rank.
        max_model_len: tokens of the longest sequence.
    """
    budget, block_bytes = min(rooms.tolist(), key=lambda room: int(room[0] // room[1]))
    num_blocks: int = budget // block_bytes
    needed = layout.max_blocks(0, max_model_len) + 1  # one is the null block
    if num_blocks < needed:
        others = " or max_num_batched_tokens" if any(layout.sliding) else ""
        raise ConfigError(
            f"option kv_cache_memory_bytes: {budget} bytes hold {num_blocks} blocks, but one "
            f"request of max_model_len ({max_model_len}) needs {needed}; give "
            f"{needed * block_bytes} bytes or more, or lower max_model_len{others}"
        )
    return num_blocks
