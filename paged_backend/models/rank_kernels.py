"""Layers of a model that several ranks compute together.

A linear layer that is divided along its outputs is a smaller layer, and needs no code. One that is
divided along its inputs computes a part of each output, and the parts of all ranks are added up.
Models do not know of it: `RankKernels` gives them such layers in place of those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.division import Division, Group
from paged_backend.models.embedding import EmbeddingMethod
from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.quantized_linear import QuantizedLinear

EMBEDDING = "model.embed_tokens"


class RankKernels:
    """The kernels of a platform, with layers that are divided among ranks.

    See :class:`~paged_backend.models.layers.Kernels`.

    Args:
        kernels: the platform, or its quantized layers.
        division: the ranks, and what this one has of each tensor.
    """

    def __init__(self, kernels: Kernels, division: Division) -> None:
        self.device = kernels.device
        self.dtype = kernels.dtype
        self.layers = kernels.layers
        self.prompt_attention = kernels.prompt_attention
        self._kernels = kernels
        self._division = division

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        spec = replace(spec, division=self._division)
        group = self._division.group
        first, size = next(iter(spec.parts.items()))
        share = self._division.share_of(spec.full_name(first))
        if share is not None and share.dim == 1:
            return SummedLinear(self._kernels.linear(spec), group)
        if share is not None and share.shape[0] < size:  # the model asks for all outputs
            rows = share.shape[0]
            return GatheredLinear(
                self._kernels.linear(replace(spec, parts={first: rows})), rows, group
            )
        return self._kernels.linear(spec)

    def embedding(self, vocab_size: int, hidden_size: int) -> EmbeddingMethod:
        """Allocate the embedding of tokens."""
        share = self._division.share_of(EMBEDDING)
        if share is None:
            return self._kernels.embedding(vocab_size, hidden_size)
        local = self._kernels.embedding(share.shape[0], hidden_size)
        return DividedEmbedding(local, share.shape[0], self._division.group)

    def token_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the RMS norm of the queries, or of the keys, of all heads of a token together.

        Each rank has some of the heads. If several ranks have the same one, all heads count alike.
        """
        group, values = self._division.group, x.float()
        total = group.sum(values.square().sum(1, keepdim=True))
        scale = torch.rsqrt(total / (x.shape[1] * group.size) + eps)
        return (values * scale * weight).to(x.dtype)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        group, spec = self._division.group, replace(spec, division=self._division)
        if not self._division.by_expert:
            return SummedExperts(self._kernels.experts(spec), group)
        count = spec.num_experts // group.size
        own = replace(spec, num_experts=count, first=group.rank * count)
        return OwnExperts(self._kernels.experts(own), own, group)


PartT = TypeVar("PartT", bound=LinearMethod | ExpertsMethod)


class _Divided(Generic[PartT]):
    """A layer of which each rank has a part.

    Args:
        part: this rank's part.
        group: the ranks.
    """

    def __init__(self, part: PartT, group: Group) -> None:
        self._part = part
        self._group = group

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        return self._part.parameters()

    def pack(self) -> None:
        """Bring the filled weights into the form that the kernels read."""
        self._part.pack()


class SummedLinear(_Divided[LinearMethod]):
    """A layer that is divided along its inputs; see `models.linear.LinearMethod`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, outputs] for this rank's inputs `x` [rows, inputs]."""
        out = self._part(x)
        return out if self._sums_ranks else self._group.sum(out)

    def with_more(self, x: Tensor, add_to: Callable[[Tensor], None]) -> Tensor:
        """Compute `self(x)` and the sum of what each rank adds.

        Args:
            x: as of a call.
            add_to: adds this rank's part to a tensor [rows, outputs] in place.
        """
        out = self._part(x)
        if not self._sums_ranks:
            add_to(out)
            return self._group.sum(out)
        more = torch.zeros_like(out)
        add_to(more)
        return out + self._group.sum(more)

    @property
    def _sums_ranks(self) -> bool:
        """True if the part itself adds up the parts of all ranks."""
        return isinstance(self._part, QuantizedLinear) and self._part.sums_ranks

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Refuse: an embedding is not divided along its inputs."""
        raise TypeError("a layer that is divided along its inputs is not an embedding")


class GatheredLinear(_Divided[LinearMethod]):
    """An output layer that is divided along its outputs; see `models.linear.LinearMethod`.

    Args:
        part: the layer with this rank's outputs.
        num_rows: the number of these.
        group: the ranks.
    """

    def __init__(self, part: LinearMethod, num_rows: int, group: Group) -> None:
        super().__init__(part, group)
        self._num_rows = num_rows

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output of all ranks [rows, outputs] for `x` [rows, inputs]."""
        return self._group.gather(self._part(x)).transpose(0, 1).flatten(1)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the rows of all ranks at `index` [count] int64, for a tied input embedding."""
        return _divided_rows(self._part, self._num_rows, index, self._group)


class DividedEmbedding:
    """A table of which each rank has some rows; see `models.embedding.EmbeddingMethod`.

    Args:
        part: this rank's rows.
        num_rows: the number of these.
        group: the ranks.
    """

    def __init__(self, part: EmbeddingMethod, num_rows: int, group: Group) -> None:
        self.table = part.table
        self._part = part
        self._num_rows = num_rows
        self._group = group

    def rows(self, index: Tensor) -> Tensor:
        """Look up the rows [count, hidden_size] at `index` [count] int64."""
        return _divided_rows(self._part, self._num_rows, index, self._group)


class SummedExperts(_Divided[ExpertsMethod]):
    """Experts of which each rank has a part; see `models.experts.ExpertsMethod`."""

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts; see `ExpertsProduct`."""
        return self._group.sum(self._part(x, expert_ids, expert_weights))


class OwnExperts(SummedExperts):
    """The experts of which this rank has some as a whole.

    Args:
        part: these experts.
        spec: their sizes.
        group: the ranks.
    """

    def __init__(self, part: ExpertsMethod, spec: ExpertsSpec, group: Group) -> None:
        super().__init__(part, group)
        self._numbers = spec.numbers

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts; see `ExpertsProduct`."""
        count = len(self._numbers)
        own = expert_ids - self._numbers.start
        own = torch.where((own < 0) | (own >= count), count, own)
        return super().__call__(x, own, expert_weights)


def _divided_rows(
    part: LinearMethod | EmbeddingMethod, num_rows: int, index: Tensor, group: Group
) -> Tensor:
    """Look up rows of which another rank may have each one."""
    local = index - group.rank * num_rows
    rows = part.rows(local.clamp(0, num_rows - 1))
    is_elsewhere = (local < 0) | (local >= num_rows)
    return group.sum(torch.where(is_elsewhere.unsqueeze(1), 0, rows))
