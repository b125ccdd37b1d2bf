"""What a model needs from its platform: functions on rows, and factories of layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paged_backend.checkpoint.moe import Routing
from paged_backend.checkpoint.shape import Activation
from paged_backend.models.attention_step import AttentionStep
from paged_backend.models.embedding import EmbeddingMethod
from paged_backend.models.experts import ExpertsMethod, ExpertsProduct, ExpertsSpec
from paged_backend.models.linear import LinearMethod, LinearProduct, LinearSpec, RowFunction
from paged_backend.models.low_rank import LowRankFactory
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight


class LayerFunctions(Protocol):
    """Functions on rows of hidden states; `platforms.portable.layers` is their reference."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale rows of `x` [rows, size] to a root mean square of 1, then by `weight` [size].

        The weight has the dtype of `x` or is float32.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Bring rows of `x` [rows, size] to a mean of 0 and a variance of 1, scale and shift them.

        `weight` and `bias` [size] have the dtype of `x`.
        """
        ...

    def add_norm(
        self,
        hidden: Tensor,
        linear: RowFunction,
        x: Tensor,
        weight: Tensor,
        eps: float,
        reader: LinearMethod | None = None,
    ) -> Tensor:
        """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum.

        Args:
            hidden: the hidden states.
            linear: the last product of a layer's part.
            x: its input.
            weight: weight of the norm.
            eps: epsilon of the norm.
            reader: the layer that alone reads the norm, which may then have the dtype to which the
                layer rounds its inputs. None if others read it.
        """
        ...

    def gated(self, linear: RowFunction, x: Tensor, activation: Activation) -> Tensor:
        """Compute activation(gate) * up for the two halves of each row of `linear(x)`.

        The result [rows, size] may have a dtype to which all linear layers round their inputs.
        """
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """GELU, without an approximation, of each number of `x` [rows, size]."""
        ...

    def add_gated(self, out: Tensor, x: Tensor, gate: Tensor) -> None:
        """Add x * sigmoid(gate) to `out` in place; both are [rows, size], `gate` is [rows, 1]."""
        ...

    def add(self, out: Tensor, x: Tensor) -> None:
        """Add `x` to `out` in place; both are [rows, size] and contiguous."""
        ...

    def multiply_silu(self, out: Tensor, gate: Tensor) -> None:
        """Multiply `out` [rows, size], contiguous, by silu(gate) in place.

        The rows of `gate` may be apart from each other.
        """
        ...

    def multiply_sigmoid(self, out: Tensor, gate: Tensor) -> None:
        """Multiply `out` by sigmoid(gate) in place; see `multiply_silu`."""
        ...

    def choose_experts(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the experts of each row.

        Args:
            logits: [rows, num_experts].
            routing: the choice.
            bias: [num_experts] float32, added to the experts' scores; None for none.

        Returns:
            The ids int32 and weights float32, [rows, num_experts_per_tok] each. The expert with the
            largest score comes first; of equal ones, the expert with the lowest id does.
        """
        ...

    def multiply_heads(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """Multiply the numbers of each head by the weight of this head.

        Args:
            out: [rows, heads, outputs] the products. A row of a head is contiguous.
            x: [rows, heads, inputs] in the same dtype. A row of a head is contiguous.
            weight: [heads, inputs, outputs] contiguous, in the dtype of weights.
        """
        ...


class Kernels(Protocol):
    """What a model needs from the platform that it is built for."""

    @property
    def device(self) -> torch.device:
        """Where the model's tensors are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        ...

    @property
    def layers(self) -> LayerFunctions:
        """The functions on rows of hidden states."""
        ...

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        ...

    def embedding(self, vocab_size: int, hidden_size: int) -> EmbeddingMethod:
        """Allocate the embedding of tokens, in the dtype of hidden states."""
        ...

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        ...

    def token_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the RMS norm of the queries, or of the keys, of all heads of a token together.

        Args:
            x: [rows, size] those of this rank.
            weight: [size] the weight of them.
            eps: epsilon of the norm.
        """
        ...

    def prompt_attention(self, lengths: Sequence[int]) -> AttentionStep:
        """Make the bidirectional attention over the whole prompts of a step.

        Args:
            lengths: the number of tokens of each prompt.
        """
        ...


class PlatformKernels(Kernels, Protocol):
    """The kernels of a platform, with products for weights in forms that it can multiply.

    Its linear layers and experts are dense; `QuantizedKernels` has others, made of these products.
    """

    @property
    def weight_forms(self) -> Collection[WeightForm]:
        """The forms of quantized weights that `quantized_linear` multiplies."""
        ...

    def quantized_linear(
        self, form: WeightForm, weight: QuantizedWeight, bias: Tensor | None
    ) -> LinearProduct:
        """Make the product of a weight that is brought into one of `weight_forms`.

        Args:
            form: one that the weight's encoding has.
            weight: [outputs, inputs].
            bias: [outputs] floats.
        """
        ...

    @property
    def low_rank(self) -> LowRankFactory:
        """Makes the products of LoRA adapters."""
        ...

    @property
    def product_experts(self) -> ProductExperts | None:
        """Computes experts with separate products for their projections; None if it cannot."""
        ...


ProductExperts = Callable[
    [ExpertsSpec, Sequence[tuple[LinearProduct, LinearProduct]]], ExpertsProduct
]
"""Makes experts of the products with gate and up together, and with down, of each of them."""

LinearFactory = Callable[[LinearSpec, PlatformKernels], LinearMethod]
"""Creates a linear layer for a spec, with the kernels of a platform."""

ExpertsFactory = Callable[[ExpertsSpec, PlatformKernels], ExpertsMethod]
"""Creates the experts of a layer for a spec, with the kernels of a platform."""

LINEAR_METHODS: dict[str, LinearFactory] = {}
"""Factories of quantized linear layers, by the value of the option ``quantization``."""


def register_linear_method(quantization: str, factory: LinearFactory) -> None:
    """Register the factory for a value of the option ``quantization``, in this process only.

    It replaces a factory that is already registered under this name.
    """
    LINEAR_METHODS[quantization] = factory


class QuantizedKernels:
    """The kernels of a platform, with quantized linear layers and experts instead of dense ones.

    Args:
        kernels: the platform.
        factory: creates the quantized linear layers.
        experts: creates the quantized experts.
    """

    def __init__(
        self, kernels: PlatformKernels, factory: LinearFactory, experts: ExpertsFactory
    ) -> None:
        self.device = kernels.device
        self.dtype = kernels.dtype
        self.layers = kernels.layers
        self.token_norm = kernels.token_norm
        self.prompt_attention = kernels.prompt_attention
        self.embedding = kernels.embedding
        self._kernels = kernels
        self._factory = factory
        self._experts = experts

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        return self._factory(spec, self._kernels)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        return self._experts(spec, self._kernels)


class NormWeights:
    """Allocates the weights of norms, and completes those that are stored minus 1.

    Those are kept in float32, as adding 1 would round them too much in the model's dtype.

    Args:
        kernels: the platform.
        unit_offset: the checkpoint has the weights minus 1.
    """

    def __init__(self, kernels: Kernels, *, unit_offset: bool) -> None:
        self.device = kernels.device
        self.dtype = torch.float32 if unit_offset else kernels.dtype
        self._unit_offset = unit_offset
        self._weights: list[Tensor] = []

    def empty(self, size: int) -> Tensor:
        """Allocate a weight [size] without values."""
        weight = torch.empty(size, dtype=self.dtype, device=self.device)
        self._weights.append(weight)
        return weight

    def pack(self) -> None:
        """Complete the filled weights."""
        if self._unit_offset:
            for weight in self._weights:
                weight += 1


class QKNorm:
    """The RMS norm of each head of the queries and of the keys (Qwen3).

    The constructor allocates the weights without values. Fill `query` and `key` [head_dim], then
    call `pack`.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, norms: NormWeights
    ) -> None:
        self.query = norms.empty(head_dim)
        self.key = norms.empty(head_dim)
        self.eps = eps
        shape = num_heads + num_kv_heads, head_dim
        self.heads = torch.empty(shape, dtype=norms.dtype, device=norms.device)
        self._num_heads = num_heads

    def fill(self, value: float) -> None:
        """Fill the weights, for a norm that has none in the checkpoint."""
        self.query.fill_(value)
        self.key.fill_(value)

    def pack(self, order: Tensor) -> None:
        """Reorder the weights, and repeat them for kernels that do not tell queries from keys.

        Args:
            order: [head_dim] int64, the checkpoint's dimension for each dimension of a head.
        """
        self.query, self.key = self.query[order], self.key[order]
        self.heads[: self._num_heads] = self.query
        self.heads[self._num_heads :] = self.key
