"""A quantized weight, independent of how a checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight (values - zeros) * scales, where a scale belongs to a block of values.

    Attributes:
        values: [outputs, inputs] integers or float8.
        scales: [ceil(outputs / rows), ceil(inputs / columns)] floats for blocks of rows x columns.
        block: the block's (rows, columns).
        zeros: zero points in the shape of `scales`; None for zero.
        groups: [inputs] the column of `scales` that belongs to each input, if it is not
            ``input // columns`` (act-order).
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    groups: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Return the weight [outputs, inputs] in the dtype of its scales.

        The formats' libraries compute in this dtype, and the result equals theirs bit for bit.
        """
        dtype = self.scales.dtype
        weight = self.values.to(dtype)
        if self.zeros is not None:
            weight = weight - self._spread(self.zeros.to(dtype))
        return weight * self._spread(self.scales)

    def channel_scales(self) -> Tensor | None:
        """Return the scales [outputs] float32 of int8 rows; None if the weight is anything else."""
        whole_rows = self.block[1] >= self.values.shape[1] and self.groups is None
        if self.values.dtype != torch.int8 or self.zeros is not None or not whole_rows:
            return None
        return self._spread_rows(self.scales)[:, 0].float()

    def _spread(self, blocks: Tensor) -> Tensor:
        """Repeat the number of each block for all of its values; size 1 stays where it suffices."""
        rows = self._spread_rows(blocks)
        if self.groups is not None:
            return rows[:, self.groups]
        inputs, columns = self.values.shape[1], self.block[1]
        return rows if columns >= inputs else rows.repeat_interleave(columns, 1)[:, :inputs]

    def _spread_rows(self, blocks: Tensor) -> Tensor:
        outputs, rows = self.values.shape[0], self.block[0]
        if rows >= outputs:
            return blocks.expand(outputs, -1)
        return blocks if rows == 1 else blocks.repeat_interleave(rows, 0)[:outputs]
