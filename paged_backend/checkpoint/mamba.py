"""State spaces that layers of Mamba and Mamba-2 keep for each sequence, as values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from paged_backend.checkpoint.tensors import (
    Role,
    TensorSpec,
    convolution_tensor,
    decay_tensor,
    linear_tensors,
)


class Mamba1Norms(Enum):
    """The RMS norms of the row for time steps, and of the vectors B and C."""

    NONE = "none"
    PLAIN = "plain"  # without weights (Falcon Mamba)
    WEIGHTED = "weighted"  # with weights (Jamba)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Shape:
    """A state space with a decay for each number of a state, after a short convolution (Mamba).

    Attributes:
        name: the name of the module in a layer.
        hidden_size: size of a row.
        values_size: channels, each with a state.
        state_dim: size of a state.
        rank: size of the row that the time steps of all channels are computed from.
        width: rows that the convolution sees, its own included.
        bias: whether the first and the last linear layer have biases.
        conv_bias: whether the convolution has.
        norms: the norms of what `x_proj` computes.
        norm_eps: epsilon of these norms; None for that of the model.
    """

    name: str = "mamba"
    hidden_size: int
    values_size: int
    state_dim: int
    rank: int
    width: int
    bias: bool
    conv_bias: bool
    norms: Mamba1Norms = Mamba1Norms.WEIGHTED
    norm_eps: float | None = None

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The numbers of a state in the model's dtype, and those in float32."""
        return self.values_size * (self.width - 1), self.values_size * self.state_dim

    @property
    def parts(self) -> tuple[int, int, int]:
        """The sizes of what `x_proj` computes: the row for time steps, B and C."""
        return self.rank, self.state_dim, self.state_dim

    @property
    def norm_weights(self) -> dict[str, int]:
        """The sizes of the weights of norms, by the checkpoint's names of the norms."""
        if self.norms is not Mamba1Norms.WEIGHTED:
            return {}
        return dict(zip(("dt_layernorm", "b_layernorm", "c_layernorm"), self.parts, strict=True))

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        hidden, inner = self.hidden_size, self.values_size
        yield from linear_tensors("in_proj", hidden, 2 * inner, self.bias, 0, (inner, inner))
        yield from linear_tensors("out_proj", inner, hidden, self.bias, 1)
        yield "conv1d.weight", convolution_tensor(inner, self.width)
        if self.conv_bias:
            yield "conv1d.bias", TensorSpec((inner,), Role.BIAS, shard=0)
        yield "x_proj.weight", TensorSpec((sum(self.parts), inner), Role.ROUTER, shard=1)
        yield "dt_proj.weight", TensorSpec((inner, self.rank), Role.ROUTER, shard=0)
        yield "dt_proj.bias", decay_tensor(inner)
        yield "A_log", decay_tensor(inner, self.state_dim)
        yield "D", decay_tensor(inner)
        for name, size in self.norm_weights.items():
            yield f"{name}.weight", TensorSpec((size,), Role.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """A state space with one decay for each head, after a short convolution (Mamba-2).

    Attributes:
        name: the name of the module in a layer.
        hidden_size: size of a row.
        num_heads: heads of values.
        head_dim: size of a head.
        num_groups: groups of heads that share the vectors B and C.
        state_dim: size of these vectors.
        width: rows that the convolution sees, its own included.
        in_bias: whether the first linear layer has a bias.
        out_bias: whether the last one has.
        conv_bias: whether the convolution has.
        dt_limits: the smallest and the largest time step.
        normed: whether the result has a norm for each group of heads.
        norm_before_gate: whether the norm is computed before the gates multiply.
        factors: factors on the gates, values, B, C and time steps of the first linear layer; empty
            for none.
        norm_eps: epsilon of this norm; None for that of the model.
        divided_norm: each rank has a part of the only group, which has one norm.
    """

    name: str = "mamba"
    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    width: int
    in_bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, math.inf)
    normed: bool = True
    norm_before_gate: bool = False
    factors: tuple[float, ...] = ()
    norm_eps: float | None = None
    divided_norm: bool = False

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The numbers of a state in the model's dtype, and those in float32."""
        return self.channels * (self.width - 1), self.values_size * self.state_dim

    @property
    def values_size(self) -> int:
        """The size of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def groups_size(self) -> int:
        """The size of the vectors B, or C, of all groups."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """The numbers of a token that are convolved: values, B and C."""
        return self.values_size + 2 * self.groups_size

    @property
    def sections(self) -> tuple[int, int, int]:
        """The sizes of the gates, of what is convolved, and of the time steps."""
        return self.values_size, self.channels, self.num_heads

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        hidden, values = self.hidden_size, self.values_size
        convolved = values, self.groups_size, self.groups_size
        size, sections = sum(self.sections), (values, *convolved, self.num_heads)
        yield from linear_tensors("in_proj", hidden, size, self.in_bias, 0, sections)
        yield from linear_tensors("out_proj", values, hidden, self.out_bias, 1)
        yield "conv1d.weight", convolution_tensor(self.channels, self.width, convolved)
        if self.conv_bias:
            yield "conv1d.bias", TensorSpec((self.channels,), Role.BIAS, 0, convolved)
        for name in ("A_log", "D", "dt_bias"):
            yield name, decay_tensor(self.num_heads)
        if self.normed:
            yield "norm.weight", TensorSpec((values,), Role.NORM, shard=0)
