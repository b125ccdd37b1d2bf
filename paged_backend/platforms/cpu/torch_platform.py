"""A CPU without compiled kernels: plain torch in any dtype, and the reference of the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend
from paged_backend.models.attention_step import AttentionStep
from paged_backend.models.base import Encoder, Model
from paged_backend.models.embedding import Embedding, EmbeddingMethod
from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.layers import LayerFunctions
from paged_backend.models.layers import ProductExperts as ProductExpertsFactory
from paged_backend.models.linear import LinearMethod, LinearProduct, LinearSpec
from paged_backend.models.low_rank import LowRankFactory, LowRankProduct
from paged_backend.models.packed_attention import PackedPrompts
from paged_backend.models.states import StateFunctions, StatePool
from paged_backend.models.step_context import StepContext
from paged_backend.platforms.cpu.model_runner import CpuModelRunner
from paged_backend.platforms.portable import layers, state_functions
from paged_backend.platforms.portable.attention import TorchAttention
from paged_backend.platforms.portable.encoder_runner import EncoderRunner
from paged_backend.platforms.portable.experts import TorchExperts, swiglu_of_rows
from paged_backend.platforms.portable.int8_linear import TorchInt8Linear
from paged_backend.platforms.portable.latent import TorchLatentAttention
from paged_backend.platforms.portable.linear import RowwiseLinear, TorchLinear
from paged_backend.platforms.portable.no_attention import NoAttention
from paged_backend.platforms.portable.product_experts import ProductExperts
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight
from paged_backend.sampling.draws import compile_draws
from paged_backend.sampling.token_masks import compile_token_masks
from paged_backend.values.config import EngineConfig
from paged_backend.values.kv_cache_groups import StateChunks
from paged_backend.values.options.cache import CPU_KV_CACHE_BYTES
from paged_backend.values.options.scheduling import CPU_LIMITS, StepLimits


class TorchPlatform:
    """See :class:`~paged_backend.platforms.base.Platform`."""

    default_kv_cache_bytes: int | None = CPU_KV_CACHE_BYTES
    supports_async_scheduling = False
    supports_cascade_attention = False
    state_chunks: StateChunks | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = self.linear_dtype = dtype
        self.kv_dtypes: Sequence[torch.dtype] = (dtype, torch.int8, torch.float8_e4m3fn)
        self.default_limits = CPU_LIMITS
        self.layers: LayerFunctions = layers
        self.low_rank: LowRankFactory = _low_rank
        self.state_functions: StateFunctions = state_functions
        self.weight_forms = (WeightForm.W8A8_INT8,)
        self.product_experts: ProductExpertsFactory = partial(
            ProductExperts, activate=swiglu_of_rows
        )

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        if spec.full_precision:
            return RowwiseLinear(spec, self.device)
        return TorchLinear(spec, self.dtype, self.device)

    def quantized_linear(
        self, form: WeightForm, weight: QuantizedWeight, bias: Tensor | None
    ) -> LinearProduct:
        """Bring a weight into the form `W8A8_INT8`."""
        return TorchInt8Linear(weight, bias, self.dtype)

    def embedding(self, vocab_size: int, hidden_size: int) -> EmbeddingMethod:
        """Allocate the embedding of tokens, in the dtype of hidden states."""
        return Embedding(vocab_size, hidden_size, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        return TorchExperts(spec, self.dtype, self.device)

    def token_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the RMS norm of the queries, or of the keys, of all heads of a token together."""
        return self.layers.rms_norm(x, weight, eps)

    def prompt_attention(self, lengths: Sequence[int]) -> AttentionStep:
        """Make the bidirectional attention over the whole prompts of a step."""
        return PackedPrompts(lengths, self.device)

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        if not spec.keeps_tokens:
            return NoAttention()
        kind = TorchLatentAttention if spec.is_latent else TorchAttention
        return kind(spec, num_blocks, self.device)

    def kv_cache_bytes(
        self,
        models: Sequence[tuple[Model, KVCacheSpec]],
        limits: StepLimits,
        config: EngineConfig,
    ) -> int:
        """Return `CPU_KV_CACHE_BYTES`, for an unset `kv_cache_memory_bytes`."""
        return CPU_KV_CACHE_BYTES

    def model_runner(
        self,
        model: Model,
        spec: KVCacheSpec,
        num_blocks: int,
        limits: StepLimits,
        config: EngineConfig,
        context: StepContext | None = None,
    ) -> CpuModelRunner:
        """Make a model runner with a KV pool of `num_blocks` blocks."""
        compile_draws()
        compile_token_masks()
        attention = self.attention(spec, num_blocks)
        if spec.states is not None:
            attention.states = StatePool(spec.states, self.state_functions, self.device)
        return self._make_runner(model, attention, spec, limits, config, context)

    def _make_runner(
        self,
        model: Model,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        limits: StepLimits,
        config: EngineConfig,
        context: StepContext | None = None,
    ) -> CpuModelRunner:
        """Make the model runner over an attention backend."""
        return CpuModelRunner(model, attention, spec, context)

    def encoder_runner(self, encoder: Encoder) -> EncoderRunner:
        """Make a model runner for an encoder."""
        return EncoderRunner(encoder)


def _low_rank(spec: LinearSpec, num_slots: int, max_rank: int) -> LowRankProduct:
    """Make the product of a layer; an adapter takes as much memory as its rank needs."""
    # Only engines with adapters wait for its kernel to be compiled.
    from paged_backend.platforms.cpu.low_rank import CpuLowRank
    from paged_backend.platforms.cpu.threads import use_threads_of_torch

    use_threads_of_torch()
    return CpuLowRank(spec, num_slots)
