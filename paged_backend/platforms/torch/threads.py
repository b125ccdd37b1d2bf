"""Divides the CPU's cores between torch's threads and those of our own kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch's operations to the calling thread for a while.

    After an operation that torch spreads over its threads, those spin for some milliseconds, and
    our kernels, which run right after it, would share the cores with them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
