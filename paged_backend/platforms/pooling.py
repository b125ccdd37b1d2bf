"""Pools hidden states into embeddings, over all the steps that compute a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import PoolSpec
from paged_backend.models.classifier import Head


class Pooler:
    """Adds up hidden states in float64, row by row, so that the sums do not depend on the steps.

    Args:
        send: copies an array to the model's device.
        head: makes a score of pooled hidden states; None for a model that makes embeddings.
    """

    def __init__(self, send: Callable[[NDArray[Any]], Tensor], head: Head | None = None) -> None:
        self._send = send
        self._head = head
        self._sums: dict[int, Tensor] = {}  # by seq_id: [hidden_size] float64

    def pool(self, hidden: Tensor, specs: list[PoolSpec]) -> Tensor:
        """Add the rows of a step to the sums, and return the means of those that are complete.

        Args:
            hidden: [num_rows, hidden_size] the rows of all specs, one after the other.
            specs: the rows of each sequence.

        Returns:
            [num_complete, hidden_size] float32, in the order of the specs. With a head:
            [num_complete, 1], the scores.
        """
        rows = hidden.double()
        if not all(spec.is_first for spec in specs):
            rows = self._with_sums(rows, specs)
        lengths = np.array([spec.num_rows + (not spec.is_first) for spec in specs], np.int64)
        # One thread adds the rows of a segment in their order, on a CPU and on a GPU.
        sums = torch.segment_reduce(rows, "sum", lengths=self._send(lengths), axis=0, unsafe=True)
        complete: list[int] = []
        counts: list[int] = []
        for index, spec in enumerate(specs):
            if spec.total is None:
                self._sums[spec.seq_id] = sums[index]
            else:
                complete.append(index)
                counts.append(spec.total)
        if len(complete) < len(specs):
            sums = sums.index_select(0, self._send(np.array(complete, np.int64)))
        pooled = (sums / self._send(np.array(counts, np.float64))[:, None]).float()
        return pooled if self._head is None else self._head(pooled)

    def _with_sums(self, rows: Tensor, specs: list[PoolSpec]) -> Tensor:
        """Return the rows, with the sum of earlier steps before the rows of a sequence."""
        parts: list[Tensor] = []
        start = 0
        for spec in specs:
            if not spec.is_first:
                parts.append(self._sums.pop(spec.seq_id)[None])
            parts.append(rows[start : start + spec.num_rows])
            start += spec.num_rows
        return torch.cat(parts)

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that have ended or lost their blocks; unknown ones are ignored."""
        for seq_id in seq_ids:
            self._sums.pop(seq_id, None)


def pooled_bytes(vectors: NDArray[np.float32]) -> list[bytes]:
    """Return each row [num_rows, hidden_size] as little-endian bytes."""
    return [row.tobytes() for row in vectors.astype("<f4", copy=False)]
