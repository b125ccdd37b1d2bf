"""Sums of small tensors of several GPUs, in one kernel that reads the memory of all of them.

A ring, as NCCL has it, sends the parts of a tensor from GPU to GPU in 2 (N - 1) steps. For a small
tensor, the latency of these steps is most of the time. In a sum in one step ("one-shot"), each GPU
waits until all others have their tensor in memory that the others can read (symmetric memory), and
adds up all of them. It reads N - 1 times the tensor, which is more than a ring's traffic from three
GPUs on. The kernel and the memory are torch's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    ProcessGroup,
    Store,
    _register_process_group,
    _SymmetricMemory,
)

from paged_backend.values.errors import option_error

MAX_BYTES = 512 * 1024
_ALIGNMENT = 16  # bytes: the kernel's loads and stores
_NAME: Any = "paged-backend-one-shot"  # torch 2.13 has a type for names, which 2.11 lacks


class OneShotSum:
    """Adds up tensors of up to `MAX_BYTES` in float32 or bfloat16, in the order of the ranks.

    All ranks get the same bits, and the sum of a number does not depend on its place. bfloat16 is
    rounded after each addition. A call is one kernel on the current stream, which CUDA graphs
    capture. The kernel waits for the other ranks without a limit: the end of a rank, or
    `step_timeout_s`, ends the process.

    Args:
        processes: torch's group of these ranks with NCCL, one on each GPU of a host.
        store: the store by which that group's ranks have found each other.
        device: the GPU of this rank.

    Raises:
        ConfigError: this process has such a group already. torch numbers the exchanges of
            addresses by process, so that ranks that were started later would wait for others.
    """

    _opened: ClassVar[bool] = False

    def __init__(self, processes: Any, store: Store, device: torch.device) -> None:
        if OneShotSum._opened:
            raise option_error(
                "enable_one_shot_all_reduce",
                "can be true for one model of a process only; load the other one in a new process",
            )
        OneShotSum._opened = True
        # torch finds the group as long as it exists.
        self._group = register(_NAME, processes, store, ProcessGroup.BackendType.NCCL, device)
        # Others are for several hosts. torch lets nobody choose the one that it has anyway.
        if _SymmetricMemory.get_backend(device) != "CUDA":
            _SymmetricMemory.set_backend("CUDA")
        self._memory = _SymmetricMemory.empty_strided_p2p((MAX_BYTES,), (1,), torch.uint8, device)
        _SymmetricMemory.rendezvous(self._memory, _NAME)

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Return whether a tensor is small enough, not empty, and of a dtype of the kernel."""
        fits = 0 < x.nbytes <= MAX_BYTES and x.nbytes % _ALIGNMENT == 0
        return fits and x.dtype in (torch.float32, torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of the contiguous tensors that the ranks give, as a new tensor."""
        if x.storage_offset() * x.itemsize % _ALIGNMENT:
            x = x.clone()
        shared = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, x, "sum", _NAME)
        return total


def register(
    name: Any,
    processes: Any,
    store: Store,
    backend: ProcessGroup.BackendType,
    device: torch.device,
) -> ProcessGroup:
    """Let torch's operations find a group by its name, without a global default group.

    Args:
        name: a string that is the name of no other group of this process.
        processes: torch's group of processes, such as a `ProcessGroupNCCL`.
        store: the store by which its ranks have found each other.
        backend: the type of `processes`.
        device: a device of the kind that it connects.

    Returns:
        the group, which torch finds as long as it exists.
    """
    group = ProcessGroup(store, processes.rank(), processes.size())
    group._set_default_backend(backend)
    group._register_backend(device, backend, processes)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group
