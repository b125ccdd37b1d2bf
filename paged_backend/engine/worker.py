"""The worker: one model on one device, with its weights and a KV pool of the right size."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from paged_backend.checkpoint.generation_config import read_sampling_defaults
from paged_backend.core.scheduler_output import DraftGuide, LaunchedStep, SchedulerOutput
from paged_backend.core.worker_state import WorkerState
from paged_backend.engine.read_model import read_model
from paged_backend.executor.base import AdapterStore, WorkerInfo
from paged_backend.models.contents import held_bytes, weight_forms
from paged_backend.models.division import ONE_RANK, Ranks
from paged_backend.platforms.base import Platform
from paged_backend.platforms.select import select_platform
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.sampling_defaults import NO_DEFAULTS


class Worker:
    """Loads a model, sizes its KV pool and runs its steps; used by one thread only.

    It is the :class:`~paged_backend.executor.base.Executor` of an engine in the same process.

    Args:
        config: the engine's options.
        folder: the checkpoint.
        tokenizer: folder or GGUF file of the tokenizer; its end token ends a generation, as do the
            tokens that the checkpoint's configurations name. None for no more tokens than these.
        ranks: the ranks that compute the model together, each of which has a worker.

    Raises:
        ConfigError: the checkpoint cannot be loaded, the pool cannot hold one longest request, or
            the device does not support an option.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        tokenizer: Path | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        started_s = time.monotonic()
        stored = read_model(config, folder, tokenizer)
        platform = select_platform(config.device, config.dtype, stored.config.dtype, config, ranks)
        limits = config.step_limits(platform.default_limits)
        _check_device_has(config, limits, platform)
        platform_s = time.monotonic()
        pooling = stored.pooling()
        if config.enable_lora and pooling is not None:
            raise option_error(
                "enable_lora", "can only be false for a model that generates nothing"
            )
        defaults = read_sampling_defaults(folder, config) if pooling is None else NO_DEFAULTS
        loaded = stored.load(platform, limits, pooling, ranks)
        self.platform = platform
        self.ranks = ranks
        self.model_runner = loaded.runner
        self.adapters: AdapterStore | None = loaded.adapters
        self._state = WorkerState(None if pooling is None else pooling.kind)
        self.info = WorkerInfo(
            step_limits=loaded.step_limits,
            max_model_len=loaded.max_model_len,
            vocab_size=stored.config.vocab_size,
            eos_token_ids=stored.config.eos_token_ids,
            device=str(platform.device),
            dtype=str(platform.linear_dtype).removeprefix("torch."),
            float32_matmul_precision=config.float32_matmul_precision,
            quantization=loaded.quantization,
            weight_forms=weight_forms(loaded.model),
            weight_bytes=held_bytes((loaded.model, loaded.draft_weights)),
            num_ranks=ranks.size,
            kv_cache=loaded.kv_cache,
            kv_bytes_per_token=loaded.kv_bytes_per_token,
            attention_backend=loaded.runner.attention_backend,
            num_blocks=loaded.num_blocks,
            kv_layout=loaded.kv_layout,
            num_graphs=loaded.runner.num_graphs,
            pooling=pooling,
            hidden_size=stored.config.hidden_size,
            scores_pairs=stored.is_reranker,
            sampling_defaults=defaults,
            kernels_s=platform_s - started_s,
            weights_s=loaded.loaded_s - platform_s,
            prepare_s=time.monotonic() - loaded.loaded_s,
        )

    def check(self) -> None:
        """Do nothing: this process alone computes the steps."""

    def launch(self, output: SchedulerOutput, guide: DraftGuide | None = None) -> LaunchedStep:
        """Start the forward pass of a step."""
        batch = self._state.apply(output)
        return self.model_runner.launch(batch if guide is None else replace(batch, guide=guide))


def _check_device_has(config: EngineConfig, limits: StepLimits, platform: Platform) -> None:
    """Refuse options that the device does not support."""
    if limits.async_scheduling and not platform.supports_async_scheduling:
        raise ConfigError(
            "option async_scheduling must be false or left out on a CPU, which computes a step "
            "before it returns; got true"
        )
    if not config.disable_cascade_attn and not platform.supports_cascade_attention:
        raise ConfigError(
            "option disable_cascade_attn must be true on a CPU, which has no cascade "
            "attention; got false"
        )
