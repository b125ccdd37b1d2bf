"""A CPU that runs plain torch: any dtype, and the reference of the other platforms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_backend.config import EngineConfig
from paged_backend.models.attention import AttentionBackend
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.layers import LayerFunctions
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.options.scheduling import CPU_LIMITS, StepLimits
from paged_backend.platforms.torch import layers
from paged_backend.platforms.torch.attention import TorchAttention
from paged_backend.platforms.torch.int8_linear import TorchInt8Linear
from paged_backend.platforms.torch.linear import TorchLinear
from paged_backend.platforms.torch.model_runner import TorchModelRunner
from paged_backend.sampling.draws import compile_draws
from paged_backend.sampling.token_masks import compile_token_masks

DEFAULT_KV_CACHE_BYTES = 512 * 2**20


class TorchPlatform:
    """See :class:`~paged_backend.platforms.base.Platform`."""

    supports_async_scheduling = False
    supports_cascade_attention = False
    supports_drafts = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = self.linear_dtype = dtype
        self.kv_dtypes: Sequence[torch.dtype] = (dtype, torch.int8, torch.float8_e4m3fn)
        self.default_limits = CPU_LIMITS
        self.layers: LayerFunctions = layers

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        return TorchLinear(spec, self.dtype, self.device)

    def int8_linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer with int8 weights."""
        return TorchInt8Linear(spec, self.dtype, self.device)

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        return TorchAttention(spec, num_blocks, self.device)

    def kv_cache_bytes(
        self, model: Model, spec: KVCacheSpec, limits: StepLimits, config: EngineConfig
    ) -> int:
        """Return `DEFAULT_KV_CACHE_BYTES`, for an unset `kv_cache_memory_bytes`."""
        return DEFAULT_KV_CACHE_BYTES

    def model_runner(
        self,
        model: Model,
        spec: KVCacheSpec,
        num_blocks: int,
        limits: StepLimits,
        config: EngineConfig,
    ) -> TorchModelRunner:
        """Make a model runner with a KV pool of `num_blocks` blocks."""
        compile_draws()
        compile_token_masks()
        return TorchModelRunner(model, self.attention(spec, num_blocks), spec.block_size)
