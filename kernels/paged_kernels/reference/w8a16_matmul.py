"""Reference for products with 8-bit weights, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels.packed_words import unpack_words


def w8a16_matmul(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    float8: bool = False,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Reference for `paged_kernels.w8a16_matmul.w8a16_matmul`, not rounded."""
    width, groups = x.shape[1], scales.shape[1]
    group = width if group_size == -1 else group_size
    numbers = unpack_words(packed, 8, width)
    weights = (numbers.view(torch.float8_e4m3fn) if float8 else numbers).double()
    if zero_points is not None:
        zeros = zero_points.view(torch.uint8)[:, :groups]
        weights -= zeros.double().repeat_interleave(group, 1)[:, :width]
    elif not float8:
        weights -= 128
    weights *= scales.double().repeat_interleave(group, 1)[:, :width]
    out = x.double() @ weights.T
    return out if bias is None else out + bias.double()
