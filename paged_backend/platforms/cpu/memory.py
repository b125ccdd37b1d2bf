"""The memory of a machine, or of the container that this process runs in."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # control group of this process, in a container

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
