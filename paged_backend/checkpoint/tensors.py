"""The tensors that a checkpoint of a decoder holds: names, shapes and roles, without torch.

The capacity planner counts them, the loader checks files against them, and dummy weights are made
from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a model does with a tensor."""

    EMBEDDING = "embedding"  # looked up row by row; also the output layer where the two are tied
    HEAD = "head"  # an output layer that is separate from the embedding
    LINEAR = "linear"  # the weight of a linear layer
    EXPERT = "expert"  # the weight of a linear layer of one expert, or of all experts
    ROUTER = "router"  # the weight of a small linear layer that chooses or weighs experts
    BIAS = "bias"
    NORM = "norm"
    OFFSET_NORM = "offset_norm"  # the weight of a norm minus 1
    SINKS = "sinks"  # scores of extra keys


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        shape: sizes of its dimensions.
        role: what the model does with it.
        shard: the dimension along which tensor-parallel ranks divide it; None if each rank needs
            the whole tensor.
        experts: the experts that it belongs to, which expert-parallel ranks divide; None if each
            rank needs it. If they are several, they are the tensor's first dimension.
    """

    shape: tuple[int, ...]
    role: Role
    shard: int | None = None
    experts: range | None = None

    @property
    def num_elements(self) -> int:
        """The product of all sizes."""
        return math.prod(self.shape)


Tensors = dict[str, TensorSpec]
"""Specifications by the names that Hugging Face gives the tensors."""


def linear_tensors(
    name: str, inputs: int, outputs: int, bias: bool, shard: int
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of a linear layer; `shard` is the dimension of the weight to divide."""
    yield f"{name}.weight", TensorSpec((outputs, inputs), Role.LINEAR, shard)
    if bias:  # of a layer that is divided along its inputs, one rank adds the whole bias
        yield f"{name}.bias", TensorSpec((outputs,), Role.BIAS, shard=0 if shard == 0 else None)
