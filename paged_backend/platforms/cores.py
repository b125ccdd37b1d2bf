"""Applies the options that choose threads and cores of a CPU."""

from __future__ import annotations

import os

import torch

from paged_backend.values.errors import option_error
from paged_backend.values.options.cpu import CpuOptions


def use_cores(options: CpuOptions) -> None:
    """Compute with the options' threads and cores, from this thread on.

    Threads that this thread starts later use the same cores. On a machine with several memory
    nodes, the system places memory on the node of the core that first writes to it.

    Raises:
        ConfigError: a core does not exist, or this process may not use it.
    """
    if options.cores:
        if not hasattr(os, "sched_setaffinity"):
            raise option_error("cpu_cores", "is supported on Linux only")
        allowed = os.sched_getaffinity(os.getpid())
        if missing := options.cores - allowed:
            raise option_error(
                "cpu_cores",
                f"must be some of the cores {sorted(allowed)} of this process, got {min(missing)}",
            )
        os.sched_setaffinity(0, options.cores)
    count = options.cpu_threads or len(options.cores)
    if count:
        torch.set_num_threads(count)


def refuse_cores(options: CpuOptions) -> None:
    """Refuse the options for a device that is no CPU.

    Raises:
        ConfigError: one of them is set.
    """
    for name in ("cpu_threads", "cpu_cores"):
        if getattr(options, name) is not None:
            raise option_error(name, "must be left out on a GPU")
