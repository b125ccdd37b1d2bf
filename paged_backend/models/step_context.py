"""What the layers of a model know about the rows of a step, beside the hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

NO_SLOT = -1
"""The slot of a row without an adapter."""

IDLE_ADAPTER = "idle"
"""In place of a digest: an adapter without weights, for steps that only warm up."""
SEGMENT_ROWS = 16
"""The largest number of rows in a segment: threads share the rows of one adapter."""


class AdapterRows:
    """The adapters of the rows that a layer has in a step, in tensors at addresses that stay.

    Args:
        max_rows: rows of the largest step.
        device: where the tensors are. On a GPU only the slots are used.

    Attributes:
        slots: [max_rows] int32, the slot of the adapter of each row, or `NO_SLOT`.
        order: [max_rows] int32, the numbers of the rows with adapters, those of each slot together.
        segments: [max_rows + 1] int32, the places in `order` at which the segments begin, and the
            end of the last one. The rows of a segment have the same slot.
        num_segments: [1] int32, the number of segments.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.slots = torch.full((max_rows,), NO_SLOT, dtype=torch.int32, device=device)
        self.order = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.segments = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self.num_segments = torch.zeros(1, dtype=torch.int32, device=device)
        self._written: bytes | None = None

    def write(self, slots: NDArray[np.int32]) -> None:
        """Write the slots [num_rows] of a step's rows, and group the rows by them.

        Most decode steps have the rows of the step before, for which nothing is to be done.
        """
        written = slots.tobytes()
        if written == self._written:
            return
        self._written = written
        rows = np.flatnonzero(slots != NO_SLOT)
        order = rows[np.argsort(slots[rows], kind="stable")]
        ordered = slots[order]
        places = np.arange(len(order))
        starts = places[(places - np.searchsorted(ordered, ordered)) % SEGMENT_ROWS == 0]
        for tensor, values in (
            (self.slots, slots),
            (self.order, order),
            (self.segments, [*starts, len(order)]),
            (self.num_segments, [len(starts)]),
        ):
            tensor.numpy()[: len(values)] = values


class StepContext:
    """The adapter of each row of the present step.

    It lives as long as the model. The model runner writes it before each forward pass, and linear
    layers with adapters read it, also from captured graphs.

    Args:
        max_rows: rows of the largest step.
        device: where the layers compute.

    Attributes:
        slots_by_adapter: the slot of each adapter that the layers hold, by its digest.
        has_adapters: whether a row of the present step has an adapter. If not, the tensors are
            those of an earlier step.
        rows: all rows of the step.
        needed_rows: the rows that are computed behind the last attention, which are only those
            with hidden states that are needed.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.slots_by_adapter: dict[str, int] = {}
        self.has_adapters = False
        self.rows = AdapterRows(max_rows, device)
        self.needed_rows = AdapterRows(max_rows, device)

    def slots_of(self, adapters: Sequence[str], num_rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the slots of a step's rows.

        Args:
            adapters: the digest of each sequence's adapter; empty for none.
            num_rows: [num_seqs] the number of consecutive rows of each sequence.
        """
        by_adapter = {"": NO_SLOT, IDLE_ADAPTER: NO_SLOT, **self.slots_by_adapter}
        slots = [by_adapter[adapter] for adapter in adapters]
        return np.repeat(np.array(slots, np.int32), num_rows)

    def begin(self, adapters: Sequence[str], num_rows: NDArray[np.int32]) -> None:
        """Write the slots of a step's rows on a CPU; all rows count as needed.

        Args:
            adapters: the digest of each sequence's adapter; empty for none.
            num_rows: [num_seqs] the number of consecutive rows of each sequence.
        """
        self.has_adapters = any(adapters)
        if self.has_adapters:
            rows = self.slots_of(adapters, num_rows)
            self.rows.write(rows)
            self.needed_rows.write(rows)

    def need(self, indices: NDArray[np.int64]) -> None:
        """Write which rows [num_needed] of the present step are needed, on a CPU."""
        if self.has_adapters:
            self.needed_rows.write(self.rows.slots.numpy()[indices])

    def copy_from(self, slots: torch.Tensor, needed: torch.Tensor) -> None:
        """Copy the slots of a step's rows on a device, by launches that a graph can capture.

        Args:
            slots: [num_rows] int32 the slot of each row.
            needed: [num_needed] int64 the rows that are needed.
        """
        self.rows.slots[: len(slots)].copy_(slots)
        torch.index_select(slots, 0, needed, out=self.needed_rows.slots[: len(needed)])
