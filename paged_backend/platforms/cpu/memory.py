"""The memory of a machine, or of the container that this process runs in."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # control group of this process, in a container

_LARGE_PAGE, _BLOCK_BYTES = 2**21, 2**26
_LINE_BYTES = 64  # bytes of a cache line

# Parameters of glibc's mallopt, and the values that keep the activations of a step.
_TRIM_THRESHOLD, _KEPT_BYTES = -1, 2**28
_MMAP_THRESHOLD, _LARGEST_CHUNK = -3, 2**25  # mallopt accepts no more


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros of any size at once: a page of memory is taken when it is first written.

    Raises:
        OSError: the system does not grant so large a tensor.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class WeightMemory:
    """Memory of weights in pages of 2 MiB, where the system has them.

    Kernels read all weights in each step, and with pages of 4 KiB the processor spends about a
    tenth of this time with looking up where the pages are.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block, self._used = torch.empty(0, dtype=torch.uint8), 0

    def keep(self, weight: Tensor) -> Tensor:
        """Return a contiguous copy of a weight."""
        return self.zeros(weight.shape, weight.dtype).copy_(weight)

    def stack(self, weights: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Return what `torch.stack` returns."""
        shape = [*weights[0].shape]
        shape.insert(dim, len(weights))
        return torch.stack([*weights], dim, out=self.zeros(shape, weights[0].dtype))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros that begin with a cache line.

        A block of 64 MiB, or one for a larger weight, is freed with the last weight in it.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._used + num_bytes > len(self._block):
                self._block, self._used = _large_pages(max(num_bytes, _BLOCK_BYTES)), 0
            memory = self._block[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return memory.view(dtype).view(shape)


def _large_pages(num_bytes: int) -> Tensor:
    """Return zeros [num_bytes] uint8 that begin with a large page."""
    size = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE + _LARGE_PAGE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    first = -memory.data_ptr() % _LARGE_PAGE
    return memory[first : first + num_bytes]


WEIGHTS = WeightMemory()
"""The memory of the weights of all models of this process."""


def keep_freed_memory() -> None:
    """Let malloc keep up to 256 MiB of freed memory for the next step, in this process.

    Without it, glibc returns the activations of a step to the system, and the next step pays a page
    fault for each 4 KiB of them. Other C libraries stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LARGEST_CHUNK)


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return how much memory this process can still take without swapping; None if unknown."""
    limits: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        limits.append(1024 * _fields(meminfo)["MemAvailable:"])
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # "max" without a limit
        used = int((cgroup / "memory.current").read_text())
        reclaimable = _fields(cgroup / "memory.stat")["inactive_file"]
        limits.append(max(0, limit - used + reclaimable))
    return min(limits, default=None)


def _fields(file: Path) -> dict[str, int]:
    """Read lines of a name, a number and perhaps a unit."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
