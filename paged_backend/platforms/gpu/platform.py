"""An NVIDIA GPU with Triton kernels, or the interpreter of these kernels on a CPU."""

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
from paged_backend.models.layers import LayerFunctions, ProductExperts
from paged_backend.models.linear import LinearMethod, LinearProduct, LinearSpec
from paged_backend.models.low_rank import LowRankFactory
from paged_backend.models.packed_attention import PackedPrompts
from paged_backend.models.states import StateFunctions, StatePool
from paged_backend.models.step_context import StepContext
from paged_backend.platforms.gpu import layers, state_functions
from paged_backend.platforms.gpu.attention import TritonAttention
from paged_backend.platforms.gpu.device import GpuDevice
from paged_backend.platforms.gpu.experts import TritonExperts
from paged_backend.platforms.gpu.latent import TritonLatentAttention
from paged_backend.platforms.gpu.linear import DenseLinear
from paged_backend.platforms.gpu.low_rank import TritonLowRank
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.platforms.gpu.quantized_linear import quantized_product, weight_forms
from paged_backend.platforms.gpu.step_rows import StepRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.portable.encoder_runner import EncoderRunner
from paged_backend.platforms.portable.no_attention import NoAttention
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight
from paged_backend.values.config import EngineConfig
from paged_backend.values.options.cache import CPU_KV_CACHE_BYTES
from paged_backend.values.options.scheduling import GPU_LIMITS, StepLimits


class GpuPlatform:
    """See :class:`~paged_backend.platforms.base.Platform`.

    Args:
        device: where the kernels run.
        dtype: dtype of weights and hidden states.
        gpu: the same device. None if it is a CPU, on which Triton's interpreter runs the kernels;
            nothing is compiled or captured then.
    """

    default_kv_cache_bytes: int | None = None
    supports_async_scheduling = True
    supports_cascade_attention = True

    def __init__(self, device: torch.device, dtype: torch.dtype, gpu: GpuDevice | None) -> None:
        self.device = device
        self.dtype = self.linear_dtype = dtype
        self.kv_dtypes: Sequence[torch.dtype] = (dtype, torch.int8)
        has_fp8 = gpu is None or gpu.has_fp8
        if has_fp8:
            self.kv_dtypes = (*self.kv_dtypes, torch.float8_e4m3fn)
        self.weight_forms = weight_forms(dtype, fp8=has_fp8)
        self.default_limits = GPU_LIMITS
        self.layers: LayerFunctions = layers
        self.product_experts: ProductExperts | None = None
        self.state_functions: StateFunctions = state_functions
        self.state_chunks = state_functions.chunks(dtype)
        self._gpu = gpu
        self._transfer = Transfer(device, gpu)
        self._rows = StepRows()
        self.low_rank: LowRankFactory = partial(TritonLowRank, dtype=dtype, transfer=self._transfer)

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        name = "" if self._gpu is None else self._gpu.name
        return DenseLinear(spec, self.dtype, self.device, name)

    def quantized_linear(
        self, form: WeightForm, weight: QuantizedWeight, bias: Tensor | None
    ) -> LinearProduct:
        """Bring a weight into one of `weight_forms`, with copies of all tensors on the device."""
        return quantized_product(form, weight, bias, self.dtype, self.device)

    def embedding(self, vocab_size: int, hidden_size: int) -> EmbeddingMethod:
        """Allocate the embedding of tokens, in the dtype of hidden states."""
        return Embedding(vocab_size, hidden_size, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        return TritonExperts(spec, self.dtype, self.device, self._rows)

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
        kind = TritonLatentAttention if spec.is_latent else TritonAttention
        return kind(spec, num_blocks, self._transfer, self._rows)

    def kv_cache_bytes(
        self,
        models: Sequence[tuple[Model, KVCacheSpec]],
        limits: StepLimits,
        config: EngineConfig,
    ) -> int:
        """Return the number of bytes for the KV pool.

        This is the fraction `gpu_memory_utilization` of the device's memory, minus all memory in
        use (the weights, and the memory of other processes) and the memory of the largest step of
        each model. With CUDA graphs, the largest step counts twice, because graphs use separate
        memory.
        """
        if self._gpu is None:
            return CPU_KV_CACHE_BYTES
        peak = sum([self._peak_of_largest_step(self._gpu, *each, limits) for each in models])
        if not config.enforce_eager:
            # Graphs keep memory of their own, but no more of it than other steps need.
            peak *= 2
        free, total = self._gpu.free_and_total_bytes
        return max(0, int(free - peak - (1 - config.gpu_memory_utilization) * total))

    def model_runner(
        self,
        model: Model,
        spec: KVCacheSpec,
        num_blocks: int,
        limits: StepLimits,
        config: EngineConfig,
        context: StepContext | None = None,
    ) -> GpuModelRunner:
        """Make a model runner with compiled kernels and captured graphs."""
        runner = self._new_runner(
            model, spec, num_blocks, limits, not config.disable_cascade_attn, context
        )
        if self._gpu is not None:
            prepare(runner, self._gpu, enforce_eager=config.enforce_eager)
        return runner

    def encoder_runner(self, encoder: Encoder) -> EncoderRunner:
        """Make a model runner for an encoder, which needs no kernels of this platform."""
        return EncoderRunner(encoder)

    def _new_runner(
        self,
        model: Model,
        spec: KVCacheSpec,
        num_blocks: int,
        limits: StepLimits,
        cascade: bool = False,
        context: StepContext | None = None,
    ) -> GpuModelRunner:
        attention = self.attention(spec, num_blocks)
        if spec.states is not None:
            attention.states = StatePool(spec.states, self.state_functions, self.device)
        return GpuModelRunner(
            model,
            attention,
            spec,
            limits,
            self.dtype,
            self._transfer,
            self._rows,
            cascade=cascade and spec.keeps_tokens,
            context=context,
        )

    def _peak_of_largest_step(
        self, gpu: GpuDevice, model: Model, spec: KVCacheSpec, limits: StepLimits
    ) -> int:
        """Bytes that a step takes besides weights and pool, measured on a pool of one block."""
        before = gpu.allocated_bytes
        runner = self._new_runner(model, spec, 1, limits)
        gpu.reset_peak()
        runner.run_largest()
        peak = gpu.peak_bytes - before
        del runner
        gpu.release_memory()
        return peak


def prepare(runner: GpuModelRunner, gpu: GpuDevice, *, enforce_eager: bool) -> None:
    """Compile the kernels, capture the graphs and reserve the memory of the largest step."""
    runner.warm_up()
    if not enforce_eager:
        runner.capture(gpu)
    # Captures empty the caching allocator, and a pool with a configured size has not yet been used
    # together with the largest step. Prompts must neither wait for memory nor run out of it.
    runner.run_largest()
