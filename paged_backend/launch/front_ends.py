"""The number of front ends of a model, unless the user chooses it."""

from __future__ import annotations

import os
from pathlib import Path

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_CORES_OF_EACH = 2  # one for the front end, and one for what tritonserver does for it
_MOST = 4


def has_nvidia_driver() -> bool:
    """Return whether this machine has a driver for NVIDIA devices."""
    return _NVIDIA_DRIVER.exists()


def choose_num_front_ends(device: str) -> int:
    """Return how many front ends share an engine on this machine.

    A response takes a front end about 110 microseconds of processor time, and it waits about as
    long for tritonserver. So one front end is too slow for 256 streams with a step of 16 ms, a
    load that a GPU can decode with most cores of the machine idle. An engine on a CPU needs the
    cores itself.

    Args:
        device: the engine's option: auto, cpu or cuda.
    """
    if device == "cpu" or not has_nvidia_driver():
        return 1
    return min(max(len(os.sched_getaffinity(0)) // _CORES_OF_EACH, 1), _MOST)
