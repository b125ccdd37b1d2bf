"""Arrays that hold the tensors which `paged_backend.values.contract` declares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

# Copies of bls.py import them from here.
from paged_backend.values.contract import INPUTS, OUTPUTS, named

__all__ = ["INPUTS", "OUTPUTS", "Array", "as_strings", "named"]

Array = npt.NDArray[Any]
"""A tensor that a model receives from Triton or sends to it."""


def as_strings(values: Iterable[str]) -> Array:
    """Return a tensor of strings [n]."""
    return np.array([value.encode() for value in values], dtype=np.object_)
