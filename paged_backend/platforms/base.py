"""The interface of a platform: everything that depends on the device that a model runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.core.scheduler_output import LaunchedStep, TokenMasks
from paged_backend.models.attention import AttentionBackend
from paged_backend.models.base import Encoder, Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.layers import PlatformKernels
from paged_backend.models.states import StateFunctions
from paged_backend.models.step_context import StepContext
from paged_backend.values.config import EngineConfig
from paged_backend.values.kv_cache_groups import StateChunks
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


class PendingTokens(Protocol):
    """A handle to sampled tokens that the device may still be computing."""

    def wait(self) -> list[int]:
        """Wait for the tokens: one for each sample of a step, then padding."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds that the device has taken to compute them. Wait for them first."""
        ...


class DraftRunner(Protocol):
    """Runs a draft model, each of its passes for one token of some sequences."""

    @property
    def model_seconds(self) -> float | None:
        """Seconds spent in passes so far; None if the host does not wait for them."""
        ...

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        ...

    def draw(
        self, scheduled_batch: ScheduledBatch, masks: TokenMasks | None = None
    ) -> PendingTokens:
        """Compute some tokens, and sample without log-probabilities.

        Args:
            scheduled_batch: the tokens, without copies of blocks.
            masks: the tokens that are allowed; None for all.
        """
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, each pair from the first to the second, in this order."""
        ...

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences that have given up their blocks."""
        ...


@runtime_checkable
class ChainingRunner(DraftRunner, Protocol):
    """Runs a draft model on a device that knows tokens before the host does.

    A pass may be drawn before the tokens of the previous one have arrived. A placeholder then
    stands for the token that its sequence has sampled last.
    """

    def follow(self, main: ModelRunner, scheduled_batch: ScheduledBatch) -> None:
        """Let the next passes begin where the texts of the model end.

        The placeholders at the end of a row stand for the newest tokens of the model's text. If the
        row has drafts in flight before it, it and the rows of the next passes move back by the
        number of wrong ones.

        Args:
            main: runs the model, on the same device.
            scheduled_batch: the next pass.
        """
        ...

    def give_drafts(self, main: ModelRunner, seq_ids: Sequence[int], place: int) -> None:
        """Let the next step of the model have the tokens of the newest pass as drafts.

        Args:
            main: runs the model, on the same device.
            seq_ids: the sequence of each token.
            place: number of drafts before these.
        """
        ...


class DecoderRunner(ModelRunner, DraftRunner, Protocol):
    """Runs a decoder, which may be the model or its draft model."""


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
        self,
        models: Sequence[tuple[Model, KVCacheSpec]],
        limits: StepLimits,
        config: EngineConfig,
    ) -> int:
        """Return the KV pool's size in bytes for an unset `kv_cache_memory_bytes`.

        Args:
            models: the model and its draft model, if there is one, with their parts of the pool.
            limits: limits of a step.
            config: the engine's options.
        """
        ...

    def model_runner(
        self,
        model: Model,
        spec: KVCacheSpec,
        num_blocks: int,
        limits: StepLimits,
        config: EngineConfig,
        context: StepContext | None = None,
    ) -> DecoderRunner:
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
