"""The worker: one model on one device, with its weights and a KV pool of the right size."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from paged_backend.checkpoint.generation_config import read_sampling_defaults
from paged_backend.checkpoint.hub import resolve_tokenizer
from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.checkpoint.task import resolve_scoring, resolve_task
from paged_backend.core.scheduler_output import LaunchedStep, SchedulerOutput
from paged_backend.core.worker_state import WorkerState
from paged_backend.executor.base import WorkerInfo
from paged_backend.models.base import Model
from paged_backend.models.contents import held_bytes, weight_forms
from paged_backend.models.kv_cache import KVCacheSpec, kv_cache_format
from paged_backend.models.loader import decoder_max_model_len, load_model
from paged_backend.models.positions import check_positions
from paged_backend.platforms.base import ModelRunner
from paged_backend.platforms.select import select_platform
from paged_backend.quantization.formats import Quantization
from paged_backend.quantization.read import read_quantization
from paged_backend.text.tokenizer import load_end_token_id, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.model import AUTO, GENERATE
from paged_backend.values.pooling_params import Pooling, PoolingType
from paged_backend.values.sampling_defaults import NO_DEFAULTS
from paged_backend.values.validation import shorten

if TYPE_CHECKING:  # imports transformers, which takes seconds
    from paged_backend.models.transformers_encoder import TransformersEncoder

_ENCODER_TOKENS = 2048  # in a step of an encoder at least: no stream waits for the next token


class Worker:
    """Loads a model, sizes its KV pool and runs its steps; used by one thread only.

    It is the :class:`~paged_backend.executor.base.Executor` of an engine in the same process.

    Args:
        config: the engine's options.
        folder: the checkpoint.
        tokenizer: folder or GGUF file of the tokenizer, whose end token ends a generation like
            those that the checkpoint's configurations name; None for no more tokens than those.

    Raises:
        ConfigError: the checkpoint cannot be loaded, the pool cannot hold one longest request, or
            the device does not support an option.
    """

    model_runner: ModelRunner

    def __init__(self, config: EngineConfig, folder: Path, tokenizer: Path | None = None) -> None:
        started_s = time.monotonic()
        model_config = _read_config(folder, config)
        if tokenizer is not None:
            model_config = _with_end_token(model_config, load_end_token_id(tokenizer))
        self.platform = select_platform(config.device, config.dtype, model_config.dtype, config)
        self.step_limits = config.step_limits(self.platform.default_limits)
        self._check_device_has(config)
        platform_s = time.monotonic()
        pooling = _pooling(config, folder, model_config)
        defaults = read_sampling_defaults(folder, config) if pooling is None else NO_DEFAULTS
        quantization = read_quantization(folder, model_config.file)
        model: Model | TransformersEncoder
        if isinstance(model_config, EncoderConfig):
            from paged_backend.models.transformers_encoder import load_encoder

            model = load_encoder(config, model_config, folder, self.platform)
            loaded_s = time.monotonic()
            cache = self._prepare_encoder(config, model)
        else:
            model = self._load_decoder(config, model_config, quantization, folder, pooling)
            loaded_s = time.monotonic()
            if isinstance(model_config, FallbackConfig):  # not all of its code can be captured
                config = replace(config, enforce_eager=True)
            cache = self._prepare_decoder(config, model, quantization)
        self._state = WorkerState(None if pooling is None else pooling.kind)
        self.info = WorkerInfo(
            step_limits=self.step_limits,
            max_model_len=model.max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            device=str(self.platform.device),
            dtype=str(self.platform.linear_dtype).removeprefix("torch."),
            float32_matmul_precision=config.float32_matmul_precision,
            quantization=quantization.method if quantization else config.quantization,
            weight_forms=weight_forms(model),
            weight_bytes=held_bytes(model),
            kv_cache=cache.format,
            kv_bytes_per_token=cache.bytes_per_token,
            attention_backend=self.model_runner.attention_backend,
            num_blocks=cache.num_blocks,
            kv_layout=cache.layout,
            num_graphs=self.model_runner.num_graphs,
            supports_drafts=self.platform.supports_drafts and pooling is None,
            pooling=pooling,
            hidden_size=model_config.hidden_size,
            scores_pairs=_is_reranker(model_config),
            sampling_defaults=defaults,
            kernels_s=platform_s - started_s,
            weights_s=loaded_s - platform_s,
            prepare_s=time.monotonic() - loaded_s,
        )

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start the forward pass of a step."""
        return self.model_runner.launch(self._state.apply(output))

    def _load_decoder(
        self,
        config: EngineConfig,
        model_config: ModelConfig | FallbackConfig,
        quantization: Quantization | None,
        folder: Path,
        pooling: Pooling | None,
    ) -> Model:
        if isinstance(model_config, FallbackConfig):
            from paged_backend.models.transformers_model import load_transformers_model

            return load_transformers_model(config, model_config, folder, self.platform)
        max_model_len = decoder_max_model_len(config, model_config)
        pool_bytes = config.kv_cache_memory_bytes or self.platform.default_kv_cache_bytes
        if pool_bytes is not None:
            check_positions(model_config, max_model_len, pool_bytes)
        has_output_layer = model_config.has_output_layer and pooling is None
        model_config = replace(model_config, has_output_layer=has_output_layer)
        return load_model(config, model_config, quantization, folder, self.platform)

    def _prepare_decoder(
        self, config: EngineConfig, model: Model, quantization: Quantization | None
    ) -> _Cache:
        """Size the KV pool, and make the model runner."""
        if not config.enable_chunked_prefill:
            self._check_whole_prompts_fit(model.max_model_len, "without chunked prefill")
        kv_dtype = config.kv_cache_dtype
        if kv_dtype == "auto" and quantization is not None:
            kv_dtype = quantization.kv_cache_dtype
        kv_format = kv_cache_format(kv_dtype, model.attention_layers, self.platform.kv_dtypes)
        spec = KVCacheSpec.of(
            model.attention_layers, config.block_size, kv_format, model.max_model_len
        )
        layout = KVCacheLayout(
            config.block_size,
            self.step_limits.max_num_batched_tokens,
            tuple(group.window for group in spec.groups),
        )
        budget = config.kv_cache_memory_bytes or self.platform.kv_cache_bytes(
            model, spec, self.step_limits, config
        )
        num_blocks = _num_blocks(spec, layout, budget, model.max_model_len)
        self.model_runner = self.platform.model_runner(
            model, spec, num_blocks, self.step_limits, config
        )
        return _Cache(str(kv_format), layout, num_blocks, spec.bytes_per_token)

    def _prepare_encoder(self, config: EngineConfig, model: TransformersEncoder) -> _Cache:
        """Give steps room for the longest prompt, and make the model runner."""
        for name, value, default in (
            ("kv_cache_dtype", config.kv_cache_dtype, "auto"),
            ("kv_cache_memory_bytes", config.kv_cache_memory_bytes, None),
        ):
            if value != default:
                raise ConfigError(
                    f"option {name} cannot be used with an encoder, which has no KV cache"
                )
        limits = self.step_limits
        if config.max_num_batched_tokens is None:
            tokens = max(limits.max_num_batched_tokens, model.max_model_len, _ENCODER_TOKENS)
            self.step_limits = replace(limits, max_num_batched_tokens=tokens)
        self._check_whole_prompts_fit(
            model.max_model_len, "for an encoder, which computes a prompt in one step"
        )
        self.model_runner = self.platform.encoder_runner(model)
        layout = KVCacheLayout(config.block_size, self.step_limits.max_num_batched_tokens, ())
        return _Cache("", layout, num_blocks=1, bytes_per_token=0)

    def _check_device_has(self, config: EngineConfig) -> None:
        """Refuse options that the device does not support."""
        if self.step_limits.async_scheduling and not self.platform.supports_async_scheduling:
            raise ConfigError(
                "option async_scheduling must be false or left out on a CPU, which computes a step "
                "before it returns; got true"
            )
        if not config.disable_cascade_attn and not self.platform.supports_cascade_attention:
            raise ConfigError(
                "option disable_cascade_attn must be true on a CPU, which has no cascade "
                "attention; got false"
            )

    def _check_whole_prompts_fit(self, max_model_len: int, reason: str) -> None:
        limit = self.step_limits.max_num_batched_tokens
        if limit < max_model_len:
            raise ConfigError(
                f"option max_num_batched_tokens must be at least max_model_len "
                f"({max_model_len}) {reason}, got {limit}"
            )


@dataclass(frozen=True, slots=True)
class _Cache:
    """The KV cache of a model; see WorkerInfo."""

    format: str
    layout: KVCacheLayout
    num_blocks: int
    bytes_per_token: int


def _read_config(
    folder: Path, config: EngineConfig
) -> ModelConfig | FallbackConfig | EncoderConfig:
    if not uses_fallback(folder, config.model_impl):
        model = load_model_config(folder)
        return model if config.classifier_from_token is None else _with_classifier(model, config)
    if config.classifier_from_token is not None:
        raise ConfigError(
            "option classifier_from_token cannot be used with a model that transformers computes"
        )
    return load_encoder_config(folder) if is_encoder(folder) else load_fallback_config(folder)


def _with_end_token(
    model: ModelConfig | FallbackConfig | EncoderConfig, token_id: int | None
) -> ModelConfig | FallbackConfig | EncoderConfig:
    """Return the model with one more token that ends a generation, if its vocabulary has it.

    Fine-tunes often have an end of turn that only their tokenizer names, beside the base model's
    generation_config.json. vLLM ends at both, too.
    """
    known = model.eos_token_ids
    if token_id is None or token_id in known or token_id >= model.vocab_size:
        return model
    return replace(model, eos_token_ids=(*known, token_id))


def _with_classifier(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Return the model with a head that is made of its output layer."""
    option, variant = "option classifier_from_token", model.variant
    tokens = parse_tokens(config.classifier_from_token or "")
    if not model.has_output_layer:
        raise ConfigError(f"{option} cannot be used: the checkpoint has no output layer")
    if variant.logits_scale != 1 or variant.logits_softcap is not None:
        raise ConfigError(f"{option} cannot be used: {model.architecture} scales its logits")
    if config.load_format == "dummy":
        raise ConfigError(f"{option} cannot be used with load_format dummy")
    tokenizer = load_tokenizer(resolve_tokenizer(config))
    first, second = (tokenizer.token_id(token) for token in tokens)
    if first is None or second is None:
        missing = tokens[0] if first is None else tokens[1]
        raise ConfigError(f"{option}: {shorten(missing)} is no token of the model's vocabulary")
    spec = ClassifierSpec(ScoreFunction.SIGMOID, (first, second))
    return replace(model, classifier=spec, has_output_layer=False, scores_by_tokens=True)


def _is_reranker(model: ModelConfig | FallbackConfig | EncoderConfig) -> bool:
    return not isinstance(model, FallbackConfig) and model.classifier is not None


def _pooling(
    config: EngineConfig, folder: Path, model: ModelConfig | FallbackConfig | EncoderConfig
) -> Pooling | None:
    """Return how the model makes embeddings; None if it generates."""
    match model:
        case ModelConfig(classifier=ClassifierSpec()):
            return resolve_scoring(config, PoolingType.LAST)
        case ModelConfig():
            return resolve_task(config, folder, model)
        case EncoderConfig(classifier=ClassifierSpec()):
            return resolve_scoring(config, PoolingType.CLS)
        case EncoderConfig():
            return resolve_task(config, folder, model, PoolingType.CLS)
    if (
        config.task not in (AUTO, GENERATE)
        or config.pooling_type is not None
        or config.normalize is not None
    ):
        raise ConfigError(
            f"options task, pooling_type and normalize cannot ask for embeddings: transformers "
            f"computes {model.architecture}, which can only generate"
        )
    return None


def _num_blocks(spec: KVCacheSpec, layout: KVCacheLayout, budget: int, max_model_len: int) -> int:
    num_blocks = spec.num_blocks(budget)
    needed = layout.max_blocks(0, max_model_len) + 1  # one is the null block
    if num_blocks < needed:
        others = " or max_num_batched_tokens" if any(layout.sliding) else ""
        raise ConfigError(
            f"option kv_cache_memory_bytes: {budget} bytes hold {num_blocks} blocks, but one "
            f"request of max_model_len ({max_model_len}) needs {needed}; give "
            f"{needed * spec.bytes_per_block} bytes or more, or lower max_model_len{others}"
        )
    return num_blocks
