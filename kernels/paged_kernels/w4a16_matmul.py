"""Products of 16-bit activations with 4-bit weights."""

from __future__ import annotations

from torch import Tensor

from paged_kernels._packed_matmul import packed_matmul


def w4a16_matmul(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply rows by the 4-bit weights (stored number - zero point) * scale, and add a bias.

    The difference is exact in the dtype of `x`. Products of a group's numbers are added in
    float32 and multiplied by the scale in float32, so no weight is rounded; the result is rounded
    once. A row's result does not depend on the number of rows: the splits of K and the order of
    all sums follow from N, K and the group size alone, also for many rows, for which one program
    adds the splits that are programs of their own for few.

    Args:
        x: [rows, K] bfloat16 or float16.
        packed: [N, words] int32, numbers from 0 to 15 as `paged_kernels.packed_words` packs them.
        scales: [N, groups] bfloat16, float16 or float32, groups = ceil(K / group_size).
        group_size: number of consecutive columns that share a scale: 32, 64, 128, or -1 for one
            scale for each row of the weights.
        zero_points: [N, ceil(groups / 8)] int32, from 0 to 15, eight to a word, the first in the
            lowest bits; 8 everywhere if None.
        bias: [N] bfloat16, float16 or float32.

    Returns:
        [rows, N] in the dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, or there are no
            groups of that size.
    """
    return packed_matmul(x, packed, scales, group_size, zero_points, bias, bits=4)
