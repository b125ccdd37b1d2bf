"""A CPU that computes in float32, with kernels compiled by numba."""

from __future__ import annotations

import torch

from paged_backend.models.attention import AttentionBackend
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.platforms.cpu import layers
from paged_backend.platforms.cpu.attention import CpuAttention
from paged_backend.platforms.cpu.linear import CpuLinear
from paged_backend.platforms.torch.platform import TorchPlatform


class CpuPlatform(TorchPlatform):
    """See :class:`~paged_backend.platforms.base.Platform`."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.layers = layers

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        return CpuLinear(spec)

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        return CpuAttention(spec, num_blocks)
