"""The ranks of a model as `torch.distributed` connects them: gloo on a CPU, NCCL on GPUs.

Its process groups are used without its global default group, so that a process may compute several
models. Calls are operations of torch, which the graphs of a CPU and of CUDA capture.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

_numbers = itertools.count()
_groups: WeakValueDictionary[int, TorchGroup] = WeakValueDictionary()  # by number

_library = torch.library.Library("paged_backend", "DEF")  # type: ignore[no-untyped-call]
_library.define("gather(Tensor x, Tensor(a!) out, int group) -> ()")  # type: ignore[no-untyped-call]
_library.define("sum(Tensor(a!) x, int group) -> ()")  # type: ignore[no-untyped-call]
_library.define("send(Tensor x, int to, int group) -> ()")  # type: ignore[no-untyped-call]
_library.define("receive(Tensor(a!) x, int source, int group) -> ()")  # type: ignore[no-untyped-call]
# The tag keeps this operation out of the graphs of a CPU. Stages have different layers, so that one
# might capture a step where another cannot, and they would expect different numbers of rows.
_library.define(  # type: ignore[no-untyped-call]
    "broadcast(Tensor(a!) x, int source, int group) -> ()",
    tags=(torch.Tag.data_dependent_output,),
)


class SmallSum(Protocol):
    """Another way to add up the tensors of all ranks, for some tensors."""

    def takes(self, x: Tensor) -> bool:
        """Return whether tensors of this shape and dtype are added up in this way."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of the contiguous tensors that the ranks give, as a new tensor."""
        ...


class TorchGroup:
    """See :class:`~paged_backend.models.division.Group`.

    Args:
        processes: torch's group of processes.
        sums_in_order: add tensors in the order of the ranks. A ring adds a number in an order that
            depends on its place, so that results would depend on the other rows of a step.

    Attributes:
        sent_bytes: bytes that this rank has sent so far, without those in replayed CUDA graphs.
        small_sum: how small tensors are added up; None: as large ones.
    """

    def __init__(self, processes: Any, *, sums_in_order: bool) -> None:
        self.processes = processes
        self.rank: int = processes.rank()
        self.size: int = processes.size()
        self.sent_bytes = 0
        self.small_sum: SmallSum | None = None
        self._sums_in_order = sums_in_order
        self._number = next(_numbers)
        _groups[self._number] = self

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors that the ranks give, of one shape; `x` may change."""
        if self.small_sum is not None and self.small_sum.takes(x):
            self.sent_bytes += x.nbytes * (self.size - 1)  # each other rank reads all of it
            return self.small_sum(x.contiguous())
        if not self._sums_in_order:
            x = x.contiguous()
            torch.ops.paged_backend.sum(x, self._number)
            return x
        total, *others = self.gather(x).unbind()
        for other in others:
            total += other
        return total

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, of one shape, as [size, *shape]."""
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        torch.ops.paged_backend.gather(x.contiguous(), out, self._number)
        return out

    def send(self, x: Tensor, to: int) -> None:
        """Send a contiguous tensor to the rank `to`, which receives it."""
        torch.ops.paged_backend.send(x, to, self._number)

    def receive(self, x: Tensor, source: int) -> None:
        """Fill `x`, contiguous, with the tensor of the same shape that the rank `source` sends."""
        torch.ops.paged_backend.receive(x, source, self._number)

    def broadcast(self, x: Tensor, source: int) -> None:
        """Fill `x`, contiguous, with the tensor of the same shape that the rank `source` has."""
        if x.numel():
            torch.ops.paged_backend.broadcast(x, source, self._number)

    @classmethod
    def on_cpus(cls, store: Store, rank: int, size: int, timeout_s: float, host: str) -> TorchGroup:
        """Connect processes over the network device that has the address of each one's host.

        Args:
            store: values by which the ranks find each other.
            rank: number of this rank, counted from 0.
            size: number of all ranks.
            timeout_s: how long a call waits for the other ranks.
            host: address of this rank's host.
        """
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # a stub lacks it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        return cls(dist.ProcessGroupGloo(store, rank, size, options), sums_in_order=True)

    @classmethod
    def on_gpus(cls, store: Store, rank: int, size: int, timeout_s: float) -> TorchGroup:
        """Connect processes with a GPU each; see `on_cpus`."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return cls(dist.ProcessGroupNCCL(store, rank, size, options), sums_in_order=False)


def _gather(x: Tensor, out: Tensor, number: int) -> None:
    group = _groups[number]
    group.sent_bytes += x.nbytes * (group.size - 1)
    group.processes._allgather_base(out.flatten(), x.flatten()).wait()


def _sum(x: Tensor, number: int) -> None:
    group = _groups[number]
    group.sent_bytes += x.nbytes * 2 * (group.size - 1) // group.size
    group.processes.allreduce([x]).wait()


def _send(x: Tensor, to: int, number: int) -> None:
    group = _groups[number]
    group.sent_bytes += x.nbytes
    group.processes.send([x], to, 0).wait()


def _receive(x: Tensor, source: int, number: int) -> None:
    _groups[number].processes.recv([x], source, 0).wait()


def _broadcast(x: Tensor, source: int, number: int) -> None:
    group = _groups[number]
    if group.rank == source:
        group.sent_bytes += x.nbytes * (group.size - 1)
    group.processes.broadcast(x, source).wait()


_library.impl("gather", _gather, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("sum", _sum, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("send", _send, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("receive", _receive, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("broadcast", _broadcast, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
