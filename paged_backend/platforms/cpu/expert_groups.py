"""The rows of a step in the order of the experts that they have chosen, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.platforms.cpu.bf16_kernels import round_row
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    array_at,
    claim,
    claim_rows,
    device_function,
    floats,
    ints,
    longs,
)


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of a row and one of its experts, sorted by expert.

    Only kernels read the values, so that graphs can repeat a step with other experts.

    Attributes:
        pairs: [num_pairs] int64 row * num_experts_per_tok + rank.
        top_k: number of experts of each row.
        bounds: [num_experts, 3] int64 an expert, the index of its first pair, and their number. The
            experts with few pairs come first, then those with many; the rest is undefined.
        counts: [3] int64 zero, the number of experts with few pairs, and the number of those with
            any.
        may_have_many: False if no expert can have many pairs.
    """

    pairs: Tensor
    top_k: int
    bounds: Tensor
    counts: Tensor
    may_have_many: bool

    @classmethod
    def of(cls, expert_ids: Tensor, num_experts: int, many: int | None) -> Groups:
        """Sort the pairs of `expert_ids` [rows, num_experts_per_tok] int32, contiguous.

        Pairs with the id `num_experts` come last, and belong to no group. An expert has many pairs
        if it has at least `many`; None means that no expert has.
        """
        num_rows, top_k = expert_ids.shape
        pairs = torch.empty(expert_ids.numel(), dtype=torch.int64)
        bounds, counts = (
            torch.empty(num_experts, 3, dtype=torch.int64),
            torch.empty(3, dtype=torch.int64),
        )
        limit = num_rows + 1 if many is None else many  # an expert has at most a pair of each row
        _sort_pairs()(
            *(expert_ids.data_ptr(), len(pairs), num_experts, limit),
            *(pairs.data_ptr(), bounds.data_ptr(), counts.data_ptr()),
        )
        return cls(pairs, top_k, bounds, counts, may_have_many=num_rows >= limit)

    def take_rows(self, x: Tensor) -> Tensor:
        """Return the row of each pair [num_pairs, size] of `x` [rows, size] float32, contiguous."""
        out = torch.empty(len(self.pairs), x.shape[1])
        _take_rows()(self.pairs.data_ptr(), x.data_ptr(), out.data_ptr(), *out.shape, self.top_k)
        return out

    def take_rounded(self, x: Tensor, depth: int, spare_rows: int) -> Tensor:
        """Return the row of each pair of `x` [rows, size] float32, contiguous, in bf16.

        Returns:
            [num_pairs + spare_rows, depth] bf16; columns after the size are zeros. The spare rows
            may hold anything.
        """
        out = torch.empty(len(self.pairs) + spare_rows, depth, dtype=torch.bfloat16)
        _take_rounded()(
            *(self.pairs.data_ptr(), x.data_ptr(), out.data_ptr(), len(self.pairs), depth),
            *(x.shape[1], self.top_k),
        )
        return out


def _sort_all_pairs(arguments: Any) -> None:
    """See `Groups`; one thread does it."""
    words = numba.carray(arguments, 8)
    ids_at, num_pairs, num_experts, many, pairs_at, bounds_at, counts_at = words[1:8]
    if claim(arguments) != 0:
        return
    ids, pairs = ints(ids_at, num_pairs), longs(pairs_at, num_pairs)
    bounds, counts = longs(bounds_at, (num_experts, 3)), longs(counts_at, 3)
    ends = np.zeros(num_experts + 1, np.int64)
    for pair in range(num_pairs):
        ends[ids[pair]] += 1
    counts[:] = 0
    start = 0
    for expert in range(num_experts):  # those with few pairs
        count = ends[expert]
        if 0 < count < many:
            _append(bounds, counts[1], expert, start, count)
            counts[1] += 1
        start += count
    counts[2], start = counts[1], 0
    for expert in range(num_experts + 1):
        count = ends[expert]
        if count >= many and expert < num_experts:
            _append(bounds, counts[2], expert, start, count)
            counts[2] += 1
        ends[expert] = start
        start += count
    for pair in range(num_pairs):
        pairs[ends[ids[pair]]] = pair
        ends[ids[pair]] += 1


@device_function
def _append(bounds: Any, place: int, expert: int, start: int, count: int) -> None:
    bounds[place, 0], bounds[place, 1], bounds[place, 2] = expert, start, count


def _take_rows_of_pairs(arguments: Any) -> None:
    _, pairs_at, x_at, out_at, num_pairs, size, top_k = numba.carray(arguments, 7)
    pairs, out = longs(pairs_at, num_pairs), floats(out_at, (num_pairs, size))
    start, end = claim_rows(arguments, num_pairs)
    while start < end:
        for pair in range(start, end):
            row = floats(x_at + pairs[pair] // top_k * size * 4, size)
            for i in range(size):
                out[pair, i] = row[i]
        start, end = claim_rows(arguments, num_pairs)


def _take_rounded_rows_of_pairs(arguments: Any) -> None:
    _, pairs_at, x_at, out_at, num_pairs, depth, size, top_k = numba.carray(arguments, 8)
    pairs, out = longs(pairs_at, num_pairs), array_at(out_at, (num_pairs, depth), np.uint16)
    start, end = claim_rows(arguments, num_pairs)
    while start < end:
        for pair in range(start, end):
            round_row(floats(x_at + pairs[pair] // top_k * size * 4, size), out[pair])
        start, end = claim_rows(arguments, num_pairs)


_sort_pairs = cache(partial(ParallelKernel, _sort_all_pairs))
_take_rows = cache(partial(ParallelKernel, _take_rows_of_pairs))
_take_rounded = cache(partial(ParallelKernel, _take_rounded_rows_of_pairs))
