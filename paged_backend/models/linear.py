"""Linear layers: what a model asks for, and the protocol of what carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer, which may compute several layers of a checkpoint as one product.

    Attributes:
        inputs: size of a row of the input.
        parts: size of the output of each layer of the checkpoint, by the layer's name there.
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
    """The storage and the product of one linear layer, x @ weight.T + bias.

    It is made without values: fill all of `slots`, then call `pack` once.
    """

    def slots(self) -> dict[str, Tensor]:
        """The memory of each tensor of a checkpoint, by its name there; invalid after `pack`."""
        ...

    def pack(self) -> None:
        """Bring the filled weight into the form that the kernels read."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """The product [rows, outputs] for `x` [rows, inputs]."""
        ...

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the product for `x` [rows, inputs] to `out` [rows, outputs] in place."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """The weight's rows at `index` [count] int64, as an embedding tied to it looks them up."""
        ...


LinearFactory = Callable[[LinearSpec, torch.dtype, torch.device], LinearMethod]
"""Makes a linear layer for hidden states of a dtype, on a device."""

LINEAR_METHODS: dict[str, LinearFactory] = {}
"""Number formats that replace a platform's own dense layers, by the option ``quantization``."""


def register_linear_method(quantization: str, factory: LinearFactory) -> None:
    """Make a number format known in this process; an old one of that name is replaced."""
    LINEAR_METHODS[quantization] = factory
