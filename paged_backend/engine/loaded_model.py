"""What a worker needs of a model of any kind: in its checkpoint, and then on a platform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paged_backend.checkpoint.encoder_config import EncoderConfig
from paged_backend.checkpoint.fallback_config import FallbackConfig
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.models.adapter_slots import AdapterSlots
from paged_backend.models.division import ONE_RANK, Group, Ranks
from paged_backend.platforms.base import ModelRunner, Platform
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.pooling_params import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on a platform that is ready to run steps.

    Attributes:
        model: the object that holds the weights.
        max_model_len: tokens of the longest sequence.
        quantization: quantization method of the weights; None if they are dense.
        runner: runs the steps.
        step_limits: limits of a step.
        kv_cache: the format of keys and values; empty without a KV cache.
        kv_bytes_per_token: bytes of a token's keys and values in all layers, with their scales.
        kv_layout: the groups of the block tables.
        num_blocks: blocks of the KV pool, with the null block.
        loaded_s: the moment on the monotonic clock at which the weights were loaded.
        adapters: holds the LoRA adapters; None for a model without any.
        draft_weights: the objects that hold the weights of the draft model or the MTP layer;
            None if no model guesses.
    """

    model: object
    max_model_len: int
    quantization: str | None
    runner: ModelRunner
    step_limits: StepLimits
    kv_cache: str
    kv_bytes_per_token: int
    kv_layout: KVCacheLayout
    num_blocks: int
    loaded_s: float
    adapters: AdapterSlots | None = None
    draft_weights: object | None = None


class StoredModel(Protocol):
    """A model in its checkpoint. Its configuration was read, and its weights are not loaded."""

    @property
    def config(self) -> ModelConfig | FallbackConfig | EncoderConfig:
        """The sizes and the tokens that end a generation."""
        ...

    @property
    def is_reranker(self) -> bool:
        """Whether the model scores pairs of texts."""
        ...

    def pooling(self) -> Pooling | None:
        """Return how the model makes embeddings or scores; None if it generates.

        Raises:
            ConfigError: the options ask for something else than the model can do.
        """
        ...

    def load(
        self,
        platform: Platform,
        limits: StepLimits,
        pooling: Pooling | None,
        ranks: Ranks = ONE_RANK,
    ) -> LoadedModel:
        """Load the weights, size the KV pool and make the model runner.

        Args:
            platform: where it computes.
            limits: limits of a step, from the options and the platform.
            pooling: the result of `pooling`.
            ranks: the ranks that compute the model together.

        Raises:
            ConfigError: the checkpoint cannot be loaded, the pool cannot hold one longest request,
                or an option does not fit the model.
        """
        ...


def refuse_tensor_ranks(ranks: Ranks, reason: str) -> None:
    """Check that each layer of a model is computed by one rank.

    Raises:
        ConfigError: it is not; ``reason`` says why it must.
    """
    _refuse("tensor_parallel_size", ranks.tensor, reason)


def refuse_stages(ranks: Ranks, reason: str) -> None:
    """Check that a model has a single stage.

    Raises:
        ConfigError: it has several; ``reason`` says why it must not.
    """
    _refuse("pipeline_parallel_size", ranks.pipeline, reason)


def _refuse(option: str, group: Group | None, reason: str) -> None:
    if group is not None:
        raise option_error(option, f"can only be 1 {reason}; got {group.size}")


def check_whole_prompts_fit(limits: StepLimits, max_model_len: int, reason: str) -> None:
    """Check that a step has room for the longest prompt.

    Raises:
        ConfigError: it has not; ``reason`` says why it must.
    """
    if limits.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"option max_num_batched_tokens must be at least max_model_len ({max_model_len}) "
            f"{reason}, got {limits.max_num_batched_tokens}"
        )
