"""CPUs with kernels that numba compiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend
from paged_backend.models.attention_step import AttentionStep
from paged_backend.models.base import Model
from paged_backend.models.embedding import EmbeddingMethod
from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.linear import LinearMethod, LinearProduct, LinearSpec
from paged_backend.models.step_context import StepContext
from paged_backend.platforms.cpu import amx_attention, bf16_linear, layers, state_functions
from paged_backend.platforms.cpu.amx import has_amx
from paged_backend.platforms.cpu.attention import CpuAttention
from paged_backend.platforms.cpu.bf16_linear import BFloat16GatedLinear, BFloat16Linear
from paged_backend.platforms.cpu.experts import CpuExperts
from paged_backend.platforms.cpu.graph_runner import CpuGraphRunner
from paged_backend.platforms.cpu.int8_experts import product_experts
from paged_backend.platforms.cpu.int8_linear import CpuInt8Linear
from paged_backend.platforms.cpu.latent import CpuLatentAttention
from paged_backend.platforms.cpu.linear import GATED_OUTPUTS, CpuGatedLinear, CpuLinear
from paged_backend.platforms.cpu.memory import available_bytes, keep_freed_memory
from paged_backend.platforms.cpu.model_runner import CpuModelRunner
from paged_backend.platforms.cpu.prompt_attention import CpuPrompts
from paged_backend.platforms.cpu.rows import CpuEmbedding
from paged_backend.platforms.cpu.split_linear import SplitLinear
from paged_backend.platforms.cpu.threads import use_threads_of_torch
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.platforms.portable.no_attention import NoAttention
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.options.scheduling import StepLimits


class CpuPlatform(TorchPlatform):
    """A CPU that computes in float32; see :class:`~paged_backend.platforms.base.Platform`.

    Args:
        splits_float32: compute linear layers on AMX units, with `SplitLinear`.
    """

    def __init__(self, *, splits_float32: bool = False) -> None:
        super().__init__(torch.float32)
        self._splits_float32 = splits_float32
        use_threads_of_torch()
        keep_freed_memory()
        self.layers = layers
        self.state_functions = state_functions
        self.product_experts = product_experts
        self.kv_dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        if self._splits_float32 and not spec.full_precision:
            return SplitLinear(spec)
        if spec.gated and spec.outputs % GATED_OUTPUTS == 0:
            return CpuGatedLinear(spec)
        return CpuLinear(spec)

    def quantized_linear(
        self, form: WeightForm, weight: QuantizedWeight, bias: Tensor | None
    ) -> LinearProduct:
        """Bring a weight into the form `W8A8_INT8`."""
        return CpuInt8Linear(weight, bias)

    def embedding(self, vocab_size: int, hidden_size: int) -> EmbeddingMethod:
        """Allocate the embedding of tokens."""
        return CpuEmbedding(vocab_size, hidden_size, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        return CpuExperts(spec, self.linear_dtype)

    def prompt_attention(self, lengths: Sequence[int]) -> AttentionStep:
        """Make the bidirectional attention over the whole prompts of a step."""
        return CpuPrompts(lengths)

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        if not spec.keeps_tokens:
            return NoAttention()
        if spec.is_latent:
            return CpuLatentAttention(spec, num_blocks)
        return CpuAttention(spec, num_blocks)

    def model_runner(
        self,
        model: Model,
        spec: KVCacheSpec,
        num_blocks: int,
        limits: StepLimits,
        config: EngineConfig,
        context: StepContext | None = None,
    ) -> CpuModelRunner:
        """Make a model runner with a KV pool of `num_blocks` blocks.

        Raises:
            ConfigError: the memory does not hold the pool. It is taken only as blocks are filled.
        """
        available, needed = available_bytes(), num_blocks * spec.bytes_per_block
        needed += 0 if spec.states is None else spec.states.num_bytes
        if available is not None and needed > available:
            raise ConfigError(
                f"option kv_cache_memory_bytes must be at most {available}, the bytes of memory "
                f"that are free; the KV cache needs {needed}"
            )
        return super().model_runner(model, spec, num_blocks, limits, config, context)

    def _make_runner(
        self,
        model: Model,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        limits: StepLimits,
        config: EngineConfig,
        context: StepContext | None = None,
    ) -> CpuModelRunner:
        if config.enforce_eager:
            return CpuModelRunner(model, attention, spec, context)
        return CpuGraphRunner(model, attention, spec, limits, context)


class BFloat16Platform(CpuPlatform):
    """The same with bf16 weights, keys and values; hidden states stay in float32.

    Args:
        amx: compute products and attention on AMX units. Without them, products round their inputs
            to bf16, too, and attention computes in float32.
    """

    def __init__(self, *, amx: bool | None = None) -> None:
        super().__init__()
        self._amx = has_amx() if amx is None else amx
        self.linear_dtype = torch.bfloat16
        self.kv_dtypes = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        if spec.full_precision:
            return CpuLinear(spec)
        if self._amx and spec.gated and spec.outputs % bf16_linear.GATED_OUTPUTS == 0:
            return BFloat16GatedLinear(spec)
        return BFloat16Linear(spec, on_amx=self._amx)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        return CpuExperts(spec, self.linear_dtype, on_amx=self._amx)

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        if not spec.keeps_tokens:
            return NoAttention()
        if spec.is_latent:
            return CpuLatentAttention(spec, num_blocks)
        amx = self._amx and spec.dtype == torch.bfloat16 and amx_attention.fits(spec)
        return CpuAttention(spec, num_blocks, amx=amx)
