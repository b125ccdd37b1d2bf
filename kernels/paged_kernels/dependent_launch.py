"""Programmatic dependent launch: a kernel is set up while the kernel before it still runs.

Each kernel that is launched with `dependent_launch` calls `wait_for_launch_before` first, and does
nothing else before it, so it sees all that earlier launches have written, as usual.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from paged_kernels.device import INTERPRETED, Device


@triton.jit
def wait_for_launch_before(DEPENDENT: tl.constexpr):
    """Wait for the launch before this one to end, then let the next one be set up."""
    if DEPENDENT:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


def dependent_launch(device: Device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls `wait_for_launch_before`.

    Devices have dependent launches from compute capability 9.0 on.
    """
    if INTERPRETED or device.arch < 90:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
