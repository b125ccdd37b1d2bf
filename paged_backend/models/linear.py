"""Linear layers: their specification, and the protocol of their implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The sizes of a linear layer, which may fuse several layers of a checkpoint (q, k and v).

    Attributes:
        inputs: size of an input row.
        parts: output size of each fused layer, by its name in the checkpoint.
        bias: whether each part has a bias.
    """

    inputs: int
    parts: Mapping[str, int]
    bias: bool = False

    @property
    def outputs(self) -> int:
        """Size of a row of the output, all parts together."""
        return sum(self.parts.values())


class LinearMethod(Protocol):
    """Stores the weights of one linear layer and computes x @ weight.T + bias.

    The constructor allocates the weights without values. Fill every tensor in `parameters()`, then
    call `pack` once.
    """

    def parameters(self) -> dict[str, Tensor]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        ...

    def pack(self) -> None:
        """Bring the filled weight into the form that the kernels read."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        ...

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        ...


LinearFactory = Callable[[LinearSpec, torch.dtype, torch.device], LinearMethod]
"""Creates a linear layer for a spec, a dtype of hidden states and a device."""

LINEAR_METHODS: dict[str, LinearFactory] = {}
"""Factories of quantized linear layers, by the value of the option ``quantization``."""


def register_linear_method(quantization: str, factory: LinearFactory) -> None:
    """Register the factory for a value of the option ``quantization``, in this process only.

    It replaces a factory that is already registered under this name.
    """
    LINEAR_METHODS[quantization] = factory
