"""Copies of rows of float32 by a kernel, which graphs repeat without torch.

An operation of torch between two kernels takes 50 microseconds or more, however small it is: the
weights have displaced its code from the caches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import torch
from torch import Tensor

from paged_backend.models.embedding import Embedding
from paged_backend.platforms.cpu.states import copy, rows_of
from paged_backend.platforms.cpu.threads import ParallelKernel, claim_rows, longs


class CpuEmbedding(Embedding):
    """A table in float32; see :class:`~paged_backend.models.embedding.EmbeddingMethod`."""

    def rows(self, index: Tensor) -> Tensor:
        """Look up the rows [count, hidden_size] at `index` [count] int64."""
        index, out = index.contiguous(), torch.empty(len(index), self.table.shape[1])
        places = self.table.data_ptr(), index.data_ptr(), out.data_ptr()
        _kernel()(*places, *out.shape, self.table.stride(0))
        return out


def contiguous(x: Tensor) -> Tensor:
    """Return rows [rows, size] float32 without gaps between them; `x` if it has none."""
    if x.is_contiguous():
        return x
    x, out = rows_of(x), torch.empty(x.shape)
    _kernel()(x.data_ptr(), 0, out.data_ptr(), *out.shape, x.stride(0))
    return out


def _copy_rows(arguments: Any) -> None:
    """Copy the rows at some numbers, or all rows if the address of the numbers is 0."""
    _, source, index_at, out, count, size, stride = numba.carray(arguments, 7)
    start, end = claim_rows(arguments, count)
    while start < end:
        for row in range(start, end):
            number = row if index_at == 0 else longs(index_at, count)[row]
            copy(out + row * size * 4, source + number * stride * 4, size)
        start, end = claim_rows(arguments, count)


@cache
def _kernel() -> ParallelKernel:
    return ParallelKernel(_copy_rows)
