"""The layout of steps for the references of layers that keep a state per sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def advance(
    pool: Tensor, slots: Tensor, query_start_loc: Tensor
) -> Iterator[tuple[Tensor, range, bool]]:
    """Yield the state of each sequence, which is written back when the next one is asked for.

    Args:
        pool: [num_slots, ...]. States are rounded to its dtype.
        slots: [num_seqs, 2] int32, the slot that a state is read from and the one that it is
            written to. Slot 0 is read as zeros, whatever it contains.
        query_start_loc: [num_seqs + 1] int32. Sequences without rows are skipped.

    Yields:
        The state in float64, to be changed in place; the rows of the sequence; and whether they
        are its first ones, because its state is read from slot 0.
    """
    starts = query_start_loc.tolist()
    for (source, target), start, end in zip(slots.tolist(), starts[:-1], starts[1:], strict=True):
        if start == end:
            continue
        state = torch.zeros(pool.shape[1:], dtype=torch.float64, device=pool.device)
        if source:
            state.copy_(pool[source])
        yield state, range(start, end), source == 0
        pool[target] = state.to(pool.dtype)
