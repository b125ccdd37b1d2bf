"""Applies the options that choose threads and cores of a CPU."""

from __future__ import annotations

import os

import torch

from paged_backend.values.errors import option_error
from paged_backend.values.options.cpu import CpuOptions


def use_cores(options: CpuOptions, rank: int = 0, num_ranks: int = 1) -> None:
    """Compute with this rank's share of the options' threads and cores, from this thread on.

    Threads that this thread starts later use the same cores. On a machine with several memory
    nodes, the system places memory on the node of the core that first writes to it.

    Args:
        options: threads and cores of all ranks together.
        rank: number of this process among those that compute the model, counted from 0.
        num_ranks: number of these processes.

    Raises:
        ConfigError: a core does not exist, or this process may not use it, or a rank has none.
    """
    share = len(options.cores) // num_ranks
    if options.cores:
        if not hasattr(os, "sched_setaffinity"):
            raise option_error("cpu_cores", "is supported on Linux only")
        allowed = os.sched_getaffinity(os.getpid())
        if missing := options.cores - allowed:
            raise option_error(
                "cpu_cores",
                f"must be some of the cores {sorted(allowed)} of this process, got {min(missing)}",
            )
        if not share:
            raise option_error("cpu_cores", f"must have a core for each of {num_ranks} ranks")
        os.sched_setaffinity(0, sorted(options.cores)[rank * share : (rank + 1) * share])
    count = options.cpu_threads or len(options.cores)
    if not count and num_ranks > 1:
        count = torch.get_num_threads()
    if count:
        torch.set_num_threads(max(1, count // num_ranks))


def refuse_cores(options: CpuOptions) -> None:
    """Refuse the options for a device that is no CPU.

    Raises:
        ConfigError: one of them is set.
    """
    for name in ("cpu_threads", "cpu_cores"):
        if getattr(options, name) is not None:
            raise option_error(name, "must be left out on a GPU")
