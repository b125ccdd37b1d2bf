"""Which kernels a device runs."""

from __future__ import annotations

import os

import torch


def kernels_run_on(device: torch.device) -> bool:
    """Whether the Triton kernels do: on a GPU and, with TRITON_INTERPRET=1, on a CPU.

    Interpreted kernels are for tests and for reading along; they are slow.
    """
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
