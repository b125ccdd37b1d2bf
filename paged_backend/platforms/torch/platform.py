"""A CPU that runs plain torch: any dtype, and the reference of the other platforms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend
from paged_backend.models.attention_step import AttentionStep
from paged_backend.models.base import Encoder, Model
from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.layers import LayerFunctions
from paged_backend.models.linear import LinearMethod, LinearProduct, LinearSpec
from paged_backend.models.packed_attention import PackedPrompts
from paged_backend.platforms.torch import layers
from paged_backend.platforms.torch.attention import TorchAttention
from paged_backend.platforms.torch.encoder_runner import EncoderRunner
from paged_backend.platforms.torch.experts import TorchExperts, swiglu_of_rows
from paged_backend.platforms.torch.int8_linear import TorchInt8Linear
from paged_backend.platforms.torch.linear import RowwiseLinear, TorchLinear
from paged_backend.platforms.torch.model_runner import TorchModelRunner
from paged_backend.platforms.torch.product_experts import ProductExperts
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight
from paged_backend.sampling.draws import compile_draws
from paged_backend.sampling.token_masks import compile_token_masks
from paged_backend.values.config import EngineConfig
from paged_backend.values.options.scheduling import CPU_LIMITS, StepLimits

DEFAULT_KV_CACHE_BYTES = 512 * 2**20


class TorchPlatform:
    """See :class:`~paged_backend.platforms.base.Platform`."""

    default_kv_cache_bytes: int | None = DEFAULT_KV_CACHE_BYTES
    supports_async_scheduling = False
    supports_cascade_attention = False
    supports_drafts = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = self.linear_dtype = dtype
        self.kv_dtypes: Sequence[torch.dtype] = (dtype, torch.int8, torch.float8_e4m3fn)
        self.default_limits = CPU_LIMITS
        self.layers: LayerFunctions = layers
        self.weight_forms = (WeightForm.W8A8_INT8,)
        self.product_experts = partial(ProductExperts, activate=swiglu_of_rows)

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

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        return TorchExperts(spec, self.dtype, self.device)

    def prompt_attention(self, lengths: Sequence[int]) -> AttentionStep:
        """Make the bidirectional attention over the whole prompts of a step."""
        return PackedPrompts(lengths, self.device)

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
        return self._make_runner(model, self.attention(spec, num_blocks), spec, limits, config)

    def _make_runner(
        self,
        model: Model,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        limits: StepLimits,
        config: EngineConfig,
    ) -> TorchModelRunner:
        """Make the model runner over an attention backend."""
        return TorchModelRunner(model, attention, spec)

    def encoder_runner(self, encoder: Encoder) -> EncoderRunner:
        """Make a model runner for an encoder."""
        return EncoderRunner(encoder)
