"""Reference for the products of low rank, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def low_rank(
    x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Return what `paged_kernels.low_rank.expand` adds to the outputs of `x`, not rounded.

    Arguments are as for `shrink` and `expand`. Returns [rows, N] float64.
    """
    out = torch.zeros(len(x), sum(sizes), dtype=torch.float64, device=x.device)
    for row, slot in enumerate(slots[: len(x)].tolist()):
        if slot < 0:
            continue
        first = 0
        for part, size in enumerate(sizes):
            rank, last = int(ranks[slot, part]), first + size
            sums = a[slot, part, :rank].double() @ x[row].double()
            out[row, first:last] = b[slot, first:last, :rank].double() @ sums
            first = last
    return out
