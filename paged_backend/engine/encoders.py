"""Encoders, which transformers computes: each prompt in one step, without a KV cache."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from paged_backend.checkpoint.encoder_config import EncoderConfig
from paged_backend.checkpoint.task import resolve_scoring, resolve_task
from paged_backend.engine.loaded_model import (
    LoadedModel,
    check_whole_prompts_fit,
    refuse_stages,
    refuse_tensor_ranks,
)
from paged_backend.models.division import ONE_RANK, Ranks
from paged_backend.platforms.base import Platform
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.pooling_params import Pooling, PoolingType

_MIN_STEP_TOKENS = 2048  # where the options leave it open: no stream waits for the next token


@dataclass(frozen=True, slots=True)
class StoredEncoder:
    """An encoder of the BERT family; see `StoredModel`."""

    options: EngineConfig
    folder: Path
    config: EncoderConfig

    @property
    def is_reranker(self) -> bool:
        """Whether the model scores pairs of texts."""
        return self.config.classifier is not None

    def pooling(self) -> Pooling | None:
        """Return how the model makes embeddings or scores."""
        if self.is_reranker:
            return resolve_scoring(self.options, PoolingType.CLS)
        return resolve_task(self.options, self.folder, self.config, PoolingType.CLS)

    def load(
        self,
        platform: Platform,
        limits: StepLimits,
        pooling: Pooling | None,
        ranks: Ranks = ONE_RANK,
    ) -> LoadedModel:
        """Load the weights, give steps room for the longest prompt, and make the model runner."""
        from paged_backend.models.transformers_encoder import load_encoder

        refuse_tensor_ranks(ranks, "for an encoder")
        refuse_stages(ranks, "for an encoder")
        model = load_encoder(self.options, self.config, self.folder, platform)
        loaded_s = time.monotonic()
        self._check_options()
        if self.options.max_num_batched_tokens is None:
            tokens = max(limits.max_num_batched_tokens, model.max_model_len, _MIN_STEP_TOKENS)
            limits = replace(limits, max_num_batched_tokens=tokens)
        check_whole_prompts_fit(
            limits, model.max_model_len, "for an encoder, which computes a prompt in one step"
        )
        return LoadedModel(
            model=model,
            max_model_len=model.max_model_len,
            quantization=None,
            runner=platform.encoder_runner(model),
            step_limits=limits,
            kv_cache="",
            kv_bytes_per_token=0,
            kv_layout=KVCacheLayout(self.options.block_size, limits.max_num_batched_tokens, ()),
            num_blocks=1,
            loaded_s=loaded_s,
        )

    def _check_options(self) -> None:
        """Refuse options of a KV cache."""
        for name, value, default in (
            ("kv_cache_dtype", self.options.kv_cache_dtype, "auto"),
            ("kv_cache_memory_bytes", self.options.kv_cache_memory_bytes, None),
        ):
            if value != default:
                raise ConfigError(
                    f"option {name} cannot be used with an encoder, which has no KV cache"
                )
