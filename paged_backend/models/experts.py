"""The experts of a layer: their specification, and the protocol of their implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paged_backend.checkpoint.moe import ExpertNames, MoeShape, SwiGLU
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.division import Division


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The sizes of the experts of a layer, which are MLPs of one size.

    Attributes:
        num_experts: number of experts that this rank has.
        hidden_size: size of an input row and of an output row.
        intermediate_size: size of a row between the projections.
        activation: activation between the projections.
        bias: whether the projections have biases.
        names: names of their tensors in the checkpoint.
        prefix: name of the module in the checkpoint that holds the experts.
        first: number of the first of these experts in the checkpoint; None if no other rank has
            experts.
        division: the ranks among which the experts are divided; sizes are those of this rank. None
            for one rank.
        plain: the experts have no gate, and the activation is max(up, 0) ** 2.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: SwiGLU = SwiGLU()
    bias: bool = False
    names: ExpertNames = ExpertNames()
    prefix: str = ""
    first: int | None = None
    division: Division | None = None
    plain: bool = False

    @property
    def input_parts(self) -> tuple[str, ...]:
        """The names of the projections that read rows: gate, unless `plain`, and up."""
        return (self.names.up,) if self.plain else (self.names.gate, self.names.up)

    @property
    def numbers(self) -> range:
        """The numbers of the experts in the checkpoint."""
        first = self.first or 0
        return range(first, first + self.num_experts)

    @classmethod
    def of(cls, moe: MoeShape, prefix: str) -> ExpertsSpec:
        """Return the specification for the layers of a model."""
        return cls(
            moe.num_experts,
            moe.expert_size,
            moe.intermediate_size,
            moe.activation,
            moe.bias,
            moe.names,
            prefix,
            plain=moe.plain,
        )


class ExpertsProduct(Protocol):
    """Computes the experts that rows have chosen.

    The result of a row does not depend on the other rows.
    """

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts, in the order of its ids.

        Args:
            x: [rows, hidden_size].
            expert_ids: [rows, num_experts_per_tok] int32, different ones in each row. If other
                ranks have experts, `num_experts` stands for each of those, which count as zeros.
            expert_weights: [rows, num_experts_per_tok] float32.

        Returns:
            [rows, hidden_size] in the dtype of `x`.
        """
        ...


class ExpertsMethod(ExpertsProduct, Protocol):
    """Stores the weights of all experts of a layer, too.

    The constructor allocates the weights without values. Fill every tensor in `parameters()`, then
    call `pack` once.
    """

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        ...

    def pack(self) -> None:
        """Bring the filled weights into the form that the kernels read."""
        ...
