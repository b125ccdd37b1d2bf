"""The interface of a platform: everything that depends on the device that a model runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.core.scheduler_output import LaunchedStep
from paged_backend.models.attention import AttentionBackend
from paged_backend.models.base import Encoder, Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.layers import PlatformKernels
from paged_backend.models.states import StateFunctions
from paged_backend.models.step_context import StepContext
from paged_backend.values.config import EngineConfig
from paged_backend.values.kv_cache_groups import KVCacheLayout, StateChunks
from paged_backend.values.options.scheduling import StepLimits


class ModelRunner(Protocol):
    """Runs the steps of one model; owns its KV pool, input buffers and sampler."""

    @property
    def model_seconds(self) -> float | None:
        """Seconds spent in forward passes so far; None if the host does not wait for them."""
        ...

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        ...

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        ...

    def launch(self, scheduled_batch: ScheduledBatch) -> LaunchedStep:
        """Start the forward pass of a step; steps are carried out in the order of their launch."""
        ...


class DraftingRunnerFactory(Protocol):
    """Joins the model runners of a model and of its draft model."""

    def __call__(self, main: ModelRunner, draft: ModelRunner, layout: KVCacheLayout) -> ModelRunner:
        """Return a model runner that draws drafts and verifies them.

        Args:
            main: the runner of the model, which `Platform.model_runner` has made.
            draft: the same of the draft model. It uses the block tables of the first group
                without a window.
            layout: the groups of the block tables.
        """
        ...


class Platform(PlatformKernels, Protocol):
    """A device with the kernels and the model runner that serve it best."""

    @property
    def linear_dtype(self) -> torch.dtype:
        """The dtype of the weights of linear layers."""
        ...

    @property
    def kv_dtypes(self) -> Sequence[torch.dtype]:
        """The dtypes in which the attention can store keys and values; the default comes first."""
        ...

    @property
    def default_limits(self) -> StepLimits:
        """The step limits for options that are not set."""
        ...

    @property
    def default_kv_cache_bytes(self) -> int | None:
        """The KV pool's size for an unset `kv_cache_memory_bytes`; None if the model decides."""
        ...

    @property
    def supports_async_scheduling(self) -> bool:
        """Whether a step may be launched while the previous one samples its tokens."""
        ...

    @property
    def drafting_runner(self) -> DraftingRunnerFactory | None:
        """The function that joins a model and its draft model; None if there is none."""
        ...

    @property
    def supports_cascade_attention(self) -> bool:
        """Whether attention can read a shared prefix once for all sequences that have it."""
        ...

    @property
    def state_functions(self) -> StateFunctions:
        """The functions on states of sequences."""
        ...

    @property
    def state_chunks(self) -> StateChunks | None:
        """The tokens that these functions compute together; None if they compute one by one."""
        ...

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        ...

    def kv_cache_bytes(
        self, model: Model, spec: KVCacheSpec, limits: StepLimits, config: EngineConfig
    ) -> int:
        """Return the KV pool's size in bytes for an unset `kv_cache_memory_bytes`."""
        ...

    def model_runner(
        self,
        model: Model,
        spec: KVCacheSpec,
        num_blocks: int,
        limits: StepLimits,
        config: EngineConfig,
        context: StepContext | None = None,
    ) -> ModelRunner:
        """Make a model runner that is ready to serve, with a KV pool of `num_blocks` blocks.

        Args:
            model: the model.
            spec: the KV pool.
            num_blocks: blocks of the pool.
            limits: limits of a step.
            config: the engine's options.
            context: what the layers know about a step's rows, which the runner writes; None for
                layers without adapters.
        """
        ...

    def encoder_runner(self, encoder: Encoder) -> ModelRunner:
        """Make a model runner for an encoder."""
        ...
