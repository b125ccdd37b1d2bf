"""How a model is divided among ranks, for the layers that must know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paged_backend.checkpoint.shares import Share, Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a rank among all ranks and hosts.

    Attributes:
        rank: the number of the rank, counted from 0.
        ranks_per_node: the number of ranks on each host; their numbers follow each other.
        host: the address of the rank's host, where the other ranks reach it.
    """

    rank: int
    ranks_per_node: int
    host: str


class SharedValues(Protocol):
    """Values that ranks tell each other while they connect; used by one thread."""

    def publish(self, key: str, value: bytes) -> None:
        """Tell all other ranks a value."""
        ...

    def next_value(self) -> tuple[str, bytes]:
        """Wait for a value that another rank tells, and return its key and the value."""
        ...


class Group(Protocol):
    """The ranks that compute a model together. All of them make the same calls in the same order.

    All ranks get the same bits. The sum of a number does not depend on its place in the tensor.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, counted from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors that the ranks give, of one shape; `x` may change."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, as [size, *shape]."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send a contiguous tensor to the rank `to`, which receives it."""
        ...

    def receive(self, x: Tensor, source: int) -> None:
        """Fill `x`, contiguous, with the tensor of the same shape that the rank `source` sends."""
        ...

    def broadcast(self, x: Tensor, source: int) -> None:
        """Fill `x`, contiguous, with the tensor of the same shape that the rank `source` has."""
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks that compute a model together, as one of them sees them.

    Attributes:
        tensor: the ranks that divide each layer of this rank's stage; None if it has one rank.
        pipeline: the ranks with this rank's share of the layers, one in each stage and in the order
            of the stages; None if there is one stage.
        ranks_per_node: the number of ranks on each host; 0 if all are on one.
    """

    tensor: Group | None = None
    pipeline: Group | None = None
    ranks_per_node: int = 0

    @property
    def rank(self) -> int:
        """The number of this rank among all."""
        stage = 0 if self.pipeline is None else self.pipeline.rank
        number = 0 if self.tensor is None else self.tensor.rank
        return stage * self._num_of_stage + number

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self._num_of_stage * (1 if self.pipeline is None else self.pipeline.size)

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host."""
        return self.rank % self.num_local

    @property
    def num_local(self) -> int:
        """The number of ranks of this rank's host."""
        return self.ranks_per_node or self.size

    @property
    def _num_of_stage(self) -> int:
        return 1 if self.tensor is None else self.tensor.size

    def gather(self, row: Tensor) -> Tensor:
        """Return the rows [count] of all ranks as [size, count]."""
        rows = row[None]
        for group in (self.tensor, self.pipeline):
            if group is not None:
                rows = group.gather(rows).flatten(0, 1)
        return rows


ONE_RANK = Ranks()
"""One process computes the model alone."""


@dataclass(frozen=True, slots=True)
class Division:
    """A group of ranks, and what this rank has of the checkpoint's tensors.

    Attributes:
        group: the ranks.
        shares: the shares of this rank.
        by_expert: each rank has some of the experts, and not a part of each of them.
    """

    group: Group
    shares: Shares
    by_expert: bool = False

    def share_of(self, layer: str) -> Share | None:
        """Return the share of the weight of a layer, by its name in the checkpoint.

        The result is None if this rank has the whole weight.
        """
        return self.shares.get(f"{layer}.weight")

    def divides_inputs(self, layer: str) -> bool:
        """Return whether each rank has some of a layer's inputs, so that results are summed up."""
        share = self.share_of(layer)
        return share is not None and share.dim == 1
