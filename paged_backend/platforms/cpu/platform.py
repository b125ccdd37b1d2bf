"""CPUs with kernels that numba compiles."""

from __future__ import annotations

import torch

from paged_backend.models.attention import AttentionBackend
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.platforms.cpu import layers
from paged_backend.platforms.cpu.amx_linear import AmxLinear
from paged_backend.platforms.cpu.attention import CpuAttention
from paged_backend.platforms.cpu.int8_linear import CpuInt8Linear
from paged_backend.platforms.cpu.kv_formats import STORED_NUMBERS
from paged_backend.platforms.cpu.linear import CpuLinear
from paged_backend.platforms.torch.platform import TorchPlatform


class CpuPlatform(TorchPlatform):
    """A CPU that computes in float32; see :class:`~paged_backend.platforms.base.Platform`."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.layers = layers
        self.kv_dtypes = tuple(STORED_NUMBERS)

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        return CpuLinear(spec)

    def int8_linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer with int8 weights."""
        return CpuInt8Linear(spec)

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        return CpuAttention(spec, num_blocks)


class AmxPlatform(CpuPlatform):
    """The same with the products of linear layers in bf16, on a CPU that has AMX.

    Hidden states, keys and values stay in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear_dtype = torch.bfloat16

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        return AmxLinear(spec)
