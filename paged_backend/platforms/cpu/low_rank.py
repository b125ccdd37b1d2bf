"""The products of adapters on the CPU, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.checkpoint.peft import LowRank
from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu.threads import ParallelKernel, claim_rows, floats, ints, longs


class CpuLowRank:
    """Float32 weights; see :class:`~paged_backend.models.low_rank.LowRankProduct`.

    The kernel finds the weights by their addresses in a table, so that graphs remain valid when
    the adapter of a slot changes.

    Args:
        spec: the layer.
        num_slots: the number of adapters.
    """

    def __init__(self, spec: LinearSpec, num_slots: int) -> None:
        self._part_sizes = torch.tensor(list(spec.parts.values()))
        # For each slot and part: the addresses of a and b, and the rank.
        self._table = torch.zeros(num_slots, len(spec.parts), 3, dtype=torch.int64)
        self._weights: list[list[LowRank]] = [[] for _ in range(num_slots)]
        _kernel()

    def prepared(self, parts: Sequence[LowRank | None]) -> Sequence[LowRank | None]:
        """Return the weights as they are."""
        return parts

    def set(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Replace the weights of a slot; see `LowRankProduct.set`."""
        self._table[slot] = 0
        self._weights[slot] = []
        for row, part in zip(self._table[slot], parts, strict=True):
            if part is not None:
                self._weights[slot].append(part)
                row.copy_(torch.tensor([part.a.data_ptr(), part.b.data_ptr(), len(part.b)]))

    def add_to(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add the product of each row; see `LowRankProduct.add_to`."""
        x = x.float().contiguous()
        tables = slots.data_ptr(), self._table.data_ptr(), self._part_sizes.data_ptr()
        sizes = *x.shape, out.shape[1], len(self._part_sizes)
        _kernel()(x.data_ptr(), out.data_ptr(), *tables, *sizes)


def _add_low_rank(arguments: Any) -> None:
    _, x_at, out_at, slots_at, table_at, sizes_at, rows, inputs, outputs, num_parts = numba.carray(
        arguments, 10
    )
    x, out = floats(x_at, (rows, inputs)), floats(out_at, (rows, outputs))
    slots, part_sizes = ints(slots_at, rows), longs(sizes_at, num_parts)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            slot = slots[row]
            if slot < 0:
                continue
            table = longs(table_at + slot * num_parts * 3 * 8, (num_parts, 3))
            column = 0
            for part in range(num_parts):
                size, rank = part_sizes[part], table[part, 2]
                a, b = floats(table[part, 0], (inputs, rank)), floats(table[part, 1], (rank, size))
                # The inner loops are over independent sums, which processors compute side by side.
                totals = np.zeros(rank, np.float32)
                for k in range(inputs):
                    for i in range(rank):
                        totals[i] += x[row, k] * a[k, i]
                for i in range(rank):
                    for k in range(size):
                        out[row, column + k] += totals[i] * b[i, k]
                column += size
        start, end = claim_rows(arguments, rows)


_kernel = cache(partial(ParallelKernel, _add_low_rank))
