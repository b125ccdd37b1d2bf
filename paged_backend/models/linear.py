"""Linear layers: their specification, and the protocol of their implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from paged_backend.checkpoint.shape import Activation
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.division import Division


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The sizes of a linear layer, which may fuse several layers of a checkpoint (q, k and v).

    Attributes:
        inputs: size of an input row.
        parts: output size of each fused layer, by its name in the checkpoint.
        bias: whether each part has a bias.
        prefix: name of the module in the checkpoint that holds the parts.
        row_order: rows of the checkpoint's weight that the outputs of some parts are computed with;
            the other parts have the checkpoint's order.
        full_precision: whether a platform keeps the weight in the dtype of hidden states and an
            option does not quantize it. The layer is small, and its rounding errors would choose
            other experts.
        gated: whether the layer is only called by `LayerFunctions.gated`.
        division: the ranks among which the layer is divided; sizes are those of this rank. None
            for one rank.
    """

    inputs: int
    parts: Mapping[str, int]
    bias: bool = False
    prefix: str = ""
    row_order: Mapping[str, Tensor] = field(default_factory=dict)
    full_precision: bool = False
    gated: bool = False
    division: Division | None = None

    @property
    def outputs(self) -> int:
        """Size of a row of the output, all parts together."""
        return sum(self.parts.values())

    @property
    def divides_inputs(self) -> bool:
        """Whether each rank has some of the inputs, so that the ranks' results are summed up."""
        names = [self.full_name(part) for part in self.parts]
        return self.division is not None and any(map(self.division.divides_inputs, names))

    def full_name(self, part: str) -> str:
        """Return the name of a part's module in the checkpoint."""
        return f"{self.prefix}.{part}" if self.prefix else part

    def reorder(self, parameters: Mapping[str, Parameter]) -> None:
        """Bring filled weights and biases into the layer's row order, in place."""
        for name, order in self.row_order.items():
            for kind in ("weight", "bias"):
                place = parameters.get(f"{name}.{kind}")
                if isinstance(place, Tensor):
                    place.copy_(place[order.to(place.device)])


class RowFunction(Protocol):
    """Computes an output row for each input row, and can add it to what a tensor holds."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, outputs] for `x` [rows, inputs]."""
        ...

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, outputs] in place."""
        ...


class LinearProduct(RowFunction, Protocol):
    """Computes x @ weight.T + bias with a weight in the form that its kernels read."""

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        ...


@runtime_checkable
class Int8Product(LinearProduct, Protocol):
    """A product with an int8 weight and a scale for each output, which rounds rows to int8.

    It equals ``scaled(sums(x), peaks, bias)``, where `peaks` are the largest absolute values of the
    rows. Ranks that have a part of each row add up their sums before they are scaled.
    """

    def sums(self, x: Tensor) -> Tensor:
        """Compute the exact sums [rows, outputs] int32 of products of int8 numbers.

        Args:
            x: [rows, inputs], not rounded yet.
        """
        ...

    def scaled(self, sums: Tensor, peaks: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output [rows, outputs] in the dtype of hidden states.

        Args:
            sums: [rows, outputs] int32.
            peaks: [rows] the largest absolute value of each row of inputs.
            bias: [outputs] floats.
        """
        ...


class LinearMethod(LinearProduct, Protocol):
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


@runtime_checkable
class GatedMethod(LinearMethod, Protocol):
    """A layer that computes gate and up of an MLP together with the activation."""

    def initial_sums(self, rows: int) -> Tensor:
        """Return what the sums of `gated` begin with: the bias of each row, or zeros.

        Returns:
            [rows, outputs] float32, with the outputs in an order that the platform chooses.
        """
        ...

    def gated(self, x: Tensor, activation: Activation, sums: Tensor | None = None) -> Tensor:
        """Compute act(gate) * up [rows, outputs / 2], in a form that other layers read.

        Args:
            x: [rows, inputs].
            activation: activation of the gate.
            sums: what the sums begin with; None for `initial_sums`.
        """
        ...
