"""A quantized weight, independent of how a checkpoint stores it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_backend.checkpoint.shares import Share


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight (values - zeros) * scales, where a scale belongs to a block of values.

    Attributes:
        values: [outputs, inputs] int8 or float8_e4m3fn. Integers of fewer bits have both signs.
        scales: [ceil(outputs / rows), ceil(inputs / columns)] floats for blocks of rows x columns.
        block: the block's (rows, columns).
        zeros: zero points in the shape of `scales`, with the range of `values`; None for zero.
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

    def channel_scales(self) -> Tensor:
        """Return the scales [outputs] float32 of a weight with one scale for each row."""
        assert self.zeros is None and self.groups is None
        assert self.block[1] >= self.values.shape[1]
        return self._spread_rows(self.scales)[:, 0].float()

    def with_row_scales(self) -> QuantizedWeight:
        """Return the same weight with blocks of a single row."""
        zeros = None if self.zeros is None else self._spread_rows(self.zeros)
        scales, block = self._spread_rows(self.scales), (1, self.block[1])
        return replace(self, scales=scales, zeros=zeros, block=block)

    def with_rows(self, index: Tensor) -> QuantizedWeight:
        """Return the weight of the rows at `index` [count] int64, in blocks of a single row."""
        rows = self.with_row_scales()
        values = rows.values.view(torch.int8)[index].view(rows.values.dtype)
        zeros = None if rows.zeros is None else rows.zeros[index]
        return replace(rows, values=values, scales=rows.scales[index], zeros=zeros)

    def take(self, share: Share) -> QuantizedWeight:
        """Return a share of the weight; blocks are divided where the share begins inside of one."""
        block = divided_block(self.block, share)
        if share.dim == 0:
            return self._take_rows(share, block[0])
        ((start, size),) = share.pieces
        values = self.values[:, start : start + size]
        if self.groups is not None:
            return replace(self, values=values, groups=self.groups[start : start + size])
        columns, width = self.block[1], block[1]
        blocks = slice(start // width, (start + size) // width)

        def taken(scales: Tensor) -> Tensor:
            return scales.repeat_interleave(columns // width, 1)[:, blocks]

        zeros = None if self.zeros is None else taken(self.zeros)
        return replace(self, values=values, scales=taken(self.scales), zeros=zeros, block=block)

    def _take_rows(self, share: Share, rows: int) -> QuantizedWeight:
        whole = self if rows == self.block[0] else self.with_row_scales()
        blocks = replace(
            share, pieces=tuple((start // rows, n // rows) for start, n in share.pieces)
        )
        values = share.take(whole.values.view(torch.int8)).view(whole.values.dtype)
        zeros = None if whole.zeros is None else blocks.take(whole.zeros)
        return replace(whole, values=values, scales=blocks.take(whole.scales), zeros=zeros)

    def order(self) -> Tensor:
        """Return the numbers [inputs] of the columns, sorted by their groups."""
        assert self.groups is not None
        return self.groups.argsort(stable=True)

    def in_order(self) -> QuantizedWeight:
        """Return the weight with its columns in that order, if they are not."""
        if self.groups is None:
            return self
        return replace(self, values=self.values[:, self.order()], groups=None)

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


def divided_block(block: tuple[int, int], share: Share) -> tuple[int, int]:
    """Return the (rows, columns) that share a scale in a share of a weight.

    Args:
        block: those of the whole weight; 0 stands for all.
        share: divides outputs or inputs.
    """
    rows, columns = block
    if share.dim == 1:
        # All pieces have one size, so each piece begins with a block of this many columns.
        return rows, math.gcd(columns, share.shape[1])
    whole_blocks = rows and not any(number % rows for piece in share.pieces for number in piece)
    return (rows if whole_blocks else min(rows, 1)), columns


def stacked(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Put weights of one format below each other.

    Returns None if they have different groups of inputs, or if groups are not of the same size, and
    so can not be neighbors in one order of the columns.
    """
    first = weights[0]
    if not all(_same_groups(weight.groups, first.groups) for weight in weights):
        return None
    if first.groups is not None and not _of_one_size(first.groups, first.block[1]):
        return None
    if len(weights) == 1:
        return first
    whole_blocks = all(len(weight.values) % first.block[0] == 0 for weight in weights[:-1])
    if not whole_blocks or any(weight.block != first.block for weight in weights):
        weights = [weight.with_row_scales() for weight in weights]
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        zeros = torch.cat(
            [torch.zeros_like(w.scales).char() if w.zeros is None else w.zeros for w in weights]
        )
    values = torch.cat([weight.values.view(torch.int8) for weight in weights])
    return QuantizedWeight(
        values.view(first.values.dtype),
        torch.cat([weight.scales for weight in weights]),
        weights[0].block,
        zeros,
        first.groups,
    )


def _same_groups(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _of_one_size(groups: Tensor, size: int) -> bool:
    """Return True if each group has `size` inputs, and the last one the rest."""
    ordered = torch.arange(len(groups), device=groups.device) // size
    return torch.equal(groups.sort().values, ordered)
