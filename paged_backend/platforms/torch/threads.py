"""Who has the CPU's cores: torch's thread pool or that of our own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, keep torch's operations to the calling thread for a while.

    After an operation that torch spreads over its threads, those spin for some milliseconds, and
    our kernels, which run right after it, would share the cores with them.
    """
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
