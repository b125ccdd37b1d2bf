"""Checks of a kernel's arguments, and the callers that skip them."""

from __future__ import annotations

import pytest
import torch
from paged_kernels.errors import ArgumentError, check_tensor, trusted_tensors


def test_trusted_tensors_are_not_checked():
    tensor = torch.zeros(3, 4)

    def check() -> None:
        check_tensor("x", tensor, (9, None), torch.float32, like=tensor)

    with trusted_tensors():
        check()
        with trusted_tensors():
            pass
        check()
    with pytest.raises(ArgumentError, match=r"^x must have shape \[9, any\], got \[3, 4\]"):
        check()
