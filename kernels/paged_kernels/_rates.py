"""The decays of layers with one rate for each head, and time steps for each row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._elementary import softplus


@dataclass(frozen=True, slots=True)
class Rates:
    """The parameters of a head's decays.

    Attributes:
        rates: [heads] float32, the logarithm of a decay for a time step of 1; its negative if
            there are no steps.
        steps: [num_tokens, heads], time steps before `softplus`; None if all of them are 1.
        bias: [heads], added to the steps, or None.
        limits: the smallest and the largest time step after `softplus`.
    """

    rates: Tensor
    steps: Tensor | None = None
    bias: Tensor | None = None
    limits: tuple[float, float] = (0.0, math.inf)


@triton.jit
def time_steps(steps, bias_ptr, channel, mask, lowest, highest):
    """Return time steps in float32: softplus(steps + bias) within limits."""
    steps = steps.to(tl.float32)
    if bias_ptr is not None:
        steps += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    return tl.minimum(tl.maximum(softplus(steps), lowest), highest)
