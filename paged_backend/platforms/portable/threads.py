"""Keeps torch's threads from competing with our kernels for CPU cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch's operations on the calling thread only, within the `with` block.

    After an operation that torch spreads over its threads, these threads spin for some
    milliseconds, and would compete for cores with our kernels that run right after it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
