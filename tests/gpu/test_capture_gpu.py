"""A capture that fails leaves a process that can go on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]

# In a process of its own: torch's allocator may not get over it.
FAILING = """
import gc
import torch
from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, StepShape
from paged_backend.platforms.gpu.device import GpuDevice

gpu = GpuDevice(torch.device("cuda"))
number = torch.ones(1, device="cuda")
stream = torch.cuda.current_stream()
try:
    StepGraphs([StepShape.decodes(1)], lambda shape: gpu.capture(lambda: number.item(), None))
except RuntimeError:
    assert torch.cuda.current_stream() == stream
    assert gc.isenabled()
    assert (number + 1).item() == 2
    print("goes on")
"""


def test_the_stream_is_set_back_after_a_capture_that_fails():
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True)
    assert done.stdout == "goes on\n", done.stderr
