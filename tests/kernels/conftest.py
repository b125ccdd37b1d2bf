"""Kernel tests run on the device where there is one, else under Triton's interpreter.

The interpreter is chosen when Triton is imported, so they need a process of their own:
``TRITON_INTERPRET=1 pytest tests/kernels``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from paged_kernels.device import INTERPRETED

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]

if INTERPRETED:
    from bounds import check_bounds
    from fast_interpreter import accelerate
    from interpreter import repair

    repair()
    accelerate()
    check_bounds()


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
