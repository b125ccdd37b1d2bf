"""Reference for products with 4-bit weights, in float64."""

from __future__ import annotations

from torch import Tensor

from paged_kernels.int4 import unpack_int4
from paged_kernels.packed_words import unpack_words


def w4a16_matmul(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Reference for `paged_kernels.w4a16_matmul.w4a16_matmul`, not rounded."""
    width = x.shape[1]
    group = width if group_size == -1 else group_size
    weights = unpack_words(packed, 4, width).double()
    if zero_points is None:
        weights -= 8
    else:
        zeros = unpack_int4(zero_points, scales.shape[1])
        weights -= zeros.double().repeat_interleave(group, 1)[:, :width]
    weights *= scales.double().repeat_interleave(group, 1)[:, :width]
    out = x.double() @ weights.T
    return out if bias is None else out + bias.double()
