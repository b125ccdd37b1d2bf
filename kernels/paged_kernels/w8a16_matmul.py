"""Products of 16-bit activations with weights of 8 bits, integers or float8_e4m3fn."""

from __future__ import annotations

from torch import Tensor

from paged_kernels._packed_matmul import packed_matmul


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
    """Multiply rows by the weights (stored number - zero point) * scale, and add a bias.

    It differs from `paged_kernels.w4a16_matmul.w4a16_matmul` by the stored numbers, which are exact
    in the dtype of `x`, too. float8_e4m3fn is unpacked by bit operations, so any device can do it.

    Args:
        x: [rows, K] bfloat16 or float16.
        packed: [N, words] int32, bytes as `paged_kernels.packed_words` packs them. A byte is a
            number from 0 to 255, or a finite float8_e4m3fn.
        scales: [N, groups] bfloat16, float16 or float32, groups = ceil(K / group_size).
        group_size: number of consecutive columns that share a scale: 32, 64, 128, or -1 for one
            scale for each row of the weights.
        float8: the bytes are float8_e4m3fn, which have no zero points.
        zero_points: [N, ceil(groups / 4)] int32, bytes from 0 to 255, the first in the lowest bits
            of a word; 128 everywhere if None.
        bias: [N] bfloat16, float16 or float32.

    Returns:
        [rows, N] in the dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or there are no
            groups of that size.
    """
    return packed_matmul(x, packed, scales, group_size, zero_points, bias, bits=8, float8=float8)
