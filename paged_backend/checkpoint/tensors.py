"""The tensors that a checkpoint of a decoder holds: names, shapes and roles, without torch.

This is the one list of them. The loader compares the files with it before it takes memory, dummy
weights are made from it, the capacity planner counts it, and the names in GGUF files follow from
it. A model's parameters have the same names and shapes (`tests/models/test_tensors.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    """What a model does with a tensor."""

    EMBEDDING = "embedding"  # looked up row by row; also the output layer where the two are tied
    LAYER_EMBEDDING = "layer_embedding"  # looked up row by row, for the inputs of layers
    HEAD = "head"  # an output layer that is separate from the embedding
    LINEAR = "linear"  # the weight of a linear layer
    EXPERT = "expert"  # the weight of a linear layer of one expert, or of all experts
    ROUTER = "router"  # the weight of a small linear layer that chooses or weighs experts
    BIAS = "bias"
    NORM = "norm"
    OFFSET_NORM = "offset_norm"  # the weight of a norm minus 1
    SINKS = "sinks"  # scores of extra keys
    CONVOLUTION = "convolution"  # the weight of a convolution of each channel
    DECAY = "decay"  # numbers that say how fast a state decays


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        shape: sizes of its dimensions.
        role: what the model does with it.
        shard: the dimension to cut for tensor parallelism, as matrix products divide. None if each
            rank needs the whole tensor.
        sections: sizes of the parts of that dimension in a fused layer, each of which is cut by
            itself; empty for one part.
        is_added_once: the tensor is the bias of a layer that is divided along its inputs, so that
            only one rank adds it.
        experts: numbers of the experts that the tensor belongs to, one or all; None for none.
    """

    shape: tuple[int, ...]
    role: Role
    shard: int | None = None
    sections: tuple[int, ...] = ()
    is_added_once: bool = False
    experts: range | None = None

    @property
    def num_elements(self) -> int:
        """The product of all sizes."""
        return math.prod(self.shape)


Tensors = dict[str, TensorSpec]
"""Specifications by the names that Hugging Face gives the tensors."""


def linear_tensors(
    name: str, inputs: int, outputs: int, bias: bool, shard: int, sections: tuple[int, ...] = ()
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of a linear layer; `shard` is the dimension of the weight to divide."""
    yield f"{name}.weight", TensorSpec((outputs, inputs), Role.LINEAR, shard, sections)
    if bias and shard == 0:
        yield f"{name}.bias", TensorSpec((outputs,), Role.BIAS, 0, sections)
    elif bias:
        yield f"{name}.bias", TensorSpec((outputs,), Role.BIAS, is_added_once=True)


def convolution_tensor(channels: int, width: int, sections: tuple[int, ...] = ()) -> TensorSpec:
    """Return the weight of a convolution of each channel, which ranks divide."""
    return TensorSpec((channels, 1, width), Role.CONVOLUTION, 0, sections)


def decay_tensor(*shape: int) -> TensorSpec:
    """Return numbers of decay, of which ranks divide the first dimension."""
    return TensorSpec(shape, Role.DECAY, shard=0)
