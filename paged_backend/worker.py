"""The worker: one model on one device, with its weights and a KV pool of the right size."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from paged_backend.checkpoint.fallback_config import (
    FallbackConfig,
    load_fallback_config,
    uses_fallback,
)
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.task import resolve_task
from paged_backend.config import EngineConfig
from paged_backend.core.scheduler_output import LaunchedStep, SchedulerOutput
from paged_backend.core.worker_state import WorkerState
from paged_backend.errors import ConfigError
from paged_backend.executor.base import WorkerInfo
from paged_backend.kv_cache_groups import KVCacheLayout
from paged_backend.models.base import Model
from paged_backend.models.contents import held_bytes, weight_forms
from paged_backend.models.kv_cache import KVCacheSpec, kv_cache_format
from paged_backend.models.loader import load_model
from paged_backend.options.model import EMBED
from paged_backend.platforms.select import select_platform
from paged_backend.quantization.read import read_quantization


class Worker:
    """Loads a model, sizes its KV pool and runs its steps; used by one thread only.

    It is the :class:`~paged_backend.executor.base.Executor` of an engine in the same process.

    Args:
        config: the engine's options.
        folder: the checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be loaded, the pool cannot hold one longest request, or
            the device does not support an option.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        started_s = time.monotonic()
        fallback = uses_fallback(folder, config.model_impl)
        model_config = load_fallback_config(folder) if fallback else load_model_config(folder)
        self.platform = select_platform(config.device, config.dtype, model_config.dtype, config)
        self.step_limits = config.step_limits(self.platform.default_limits)
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
        platform_s = time.monotonic()
        pooling = None
        if isinstance(model_config, FallbackConfig):
            _check_generates(config, model_config)
        else:
            pooling = resolve_task(config, folder, model_config)
            model_config = replace(
                model_config, has_output_layer=model_config.has_output_layer and pooling is None
            )
        quantization = read_quantization(folder, model_config.file)
        model: Model
        if isinstance(model_config, FallbackConfig):
            from paged_backend.models.transformers_model import load_transformers_model

            model = load_transformers_model(config, model_config, folder, self.platform)
            config = replace(config, enforce_eager=True)  # not all of its code can be captured
        else:
            model = load_model(config, model_config, quantization, folder, self.platform)
        loaded_s = time.monotonic()
        self._check_whole_prompts_fit(config, model.max_model_len)
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
        self._state = WorkerState(None if pooling is None else pooling.kind)
        self.info = WorkerInfo(
            step_limits=self.step_limits,
            max_model_len=model.max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            device=str(self.platform.device),
            dtype=str(self.platform.linear_dtype).removeprefix("torch."),
            quantization=quantization.method if quantization else config.quantization,
            weight_forms=weight_forms(model),
            weight_bytes=held_bytes(model),
            kv_cache=str(kv_format),
            kv_bytes_per_token=spec.bytes_per_token,
            attention_backend=self.model_runner.attention_backend,
            num_blocks=num_blocks,
            kv_layout=layout,
            num_graphs=self.model_runner.num_graphs,
            supports_drafts=self.platform.supports_drafts and pooling is None,
            pooling=pooling,
            hidden_size=model_config.hidden_size,
            kernels_s=platform_s - started_s,
            weights_s=loaded_s - platform_s,
            prepare_s=time.monotonic() - loaded_s,
        )

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start the forward pass of a step."""
        return self.model_runner.launch(self._state.apply(output))

    def _check_whole_prompts_fit(self, config: EngineConfig, max_model_len: int) -> None:
        limit = self.step_limits.max_num_batched_tokens
        if not config.enable_chunked_prefill and limit < max_model_len:
            raise ConfigError(
                f"option max_num_batched_tokens must be at least max_model_len "
                f"({max_model_len}) without chunked prefill, got {limit}"
            )


def _check_generates(config: EngineConfig, model: FallbackConfig) -> None:
    if config.task == EMBED or config.pooling_type is not None or config.normalize is not None:
        raise ConfigError(
            f"options task, pooling_type and normalize cannot ask for embeddings: transformers "
            f"computes {model.architecture}, which can only generate"
        )


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
