"""Linear layers: their specification, and the protocol of their implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The sizes of a linear layer, which may fuse several layers of a checkpoint (q, k and v).

    Attributes:
        inputs: size of an input row.
        parts: output size of each fused layer, by its name in the checkpoint.
        bias: whether each part has a bias.
        prefix: name of the module in the checkpoint that holds the parts.
    """

    inputs: int
    parts: Mapping[str, int]
    bias: bool = False
    prefix: str = ""

    @property
    def outputs(self) -> int:
        """Size of a row of the output, all parts together."""
        return sum(self.parts.values())

    def full_name(self, part: str) -> str:
        """Return the name of a part's module in the checkpoint."""
        return f"{self.prefix}.{part}" if self.prefix else part


class LinearMethod(Protocol):
    """Stores the weights of one linear layer and computes x @ weight.T + bias.

    The constructor allocates the weights without values. Fill every tensor in `parameters()`, then
    call `pack` once.
    """

    def parameters(self) -> dict[str, Parameter]:
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
