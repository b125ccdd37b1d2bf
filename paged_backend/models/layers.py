"""What a model needs from its platform: norms, activations and a factory of linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from paged_backend.models.linear import LinearMethod, LinearSpec


class LayerFunctions(Protocol):
    """Functions on rows of hidden states; `platforms.torch.layers` is their reference."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale rows of `x` [rows, size] to a root mean square of 1, then by `weight` [size]."""
        ...

    def add_norm(
        self, hidden: Tensor, linear: LinearMethod, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up for the two halves of each row of `gate_up` [rows, 2 * size]."""
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

    def int8_linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer with int8 weights, whose input is rounded to int8 row by row.

        Its parameters are the ``weight`` int8 [size, inputs] of each part, the ``weight_scale``
        float32 [size], and the ``bias``.
        """
        ...


LinearFactory = Callable[[LinearSpec, Kernels], LinearMethod]
"""Creates a linear layer for a spec, with the kernels of a platform."""

LINEAR_METHODS: dict[str, LinearFactory] = {}
"""Factories of quantized linear layers, by the value of the option ``quantization``."""


def register_linear_method(quantization: str, factory: LinearFactory) -> None:
    """Register the factory for a value of the option ``quantization``, in this process only.

    It replaces a factory that is already registered under this name.
    """
    LINEAR_METHODS[quantization] = factory


class QuantizedKernels:
    """The kernels of a platform, with quantized linear layers instead of the dense ones.

    Args:
        kernels: the platform.
        factory: creates the quantized linear layers.
    """

    def __init__(self, kernels: Kernels, factory: LinearFactory) -> None:
        self.device = kernels.device
        self.dtype = kernels.dtype
        self.layers = kernels.layers
        self.int8_linear = kernels.int8_linear
        self._kernels = kernels
        self._factory = factory

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        return self._factory(spec, self._kernels)


class QKNorm:
    """The RMS norm of each head of the queries and of the keys (Qwen3).

    The constructor allocates the weights without values. Fill `query` and `key` [head_dim], then
    call `pack`.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, kernels: Kernels
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=kernels.dtype, device=kernels.device)

        self.query = empty(head_dim)
        self.key = empty(head_dim)
        self.eps = eps
        self.heads = empty(num_heads + num_kv_heads, head_dim)
        self._num_heads = num_heads

    def pack(self) -> None:
        """Repeat the weights for each head, for kernels that do not tell queries from keys."""
        self.heads[: self._num_heads] = self.query
        self.heads[self._num_heads :] = self.key
