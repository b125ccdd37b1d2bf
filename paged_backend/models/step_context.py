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


class StepContext:
    """The adapter of each row of the present step, in tensors at addresses that stay.

    It lives as long as the model. The model runner writes it before each forward pass, and linear
    layers with adapters read it, also from captured graphs.

    Args:
        max_rows: rows of the largest step.
        device: where the layers compute.

    Attributes:
        slots_by_adapter: the slot of each adapter that the layers hold, by its digest.
        has_adapters: whether a row of the present step has an adapter. If not, the tensors are
            those of an earlier step.
        slots: [max_rows] int32, the slot of the adapter of each row, or `NO_SLOT`.
        needed_slots: [max_rows] int32, the same for the rows that are computed behind the last
            attention, which are only those with hidden states that are needed.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.slots_by_adapter: dict[str, int] = {}
        self.has_adapters = False
        self.slots = torch.full((max_rows,), NO_SLOT, dtype=torch.int32, device=device)
        self.needed_slots = self.slots.clone()

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
            for tensor in (self.slots, self.needed_slots):
                tensor.numpy()[: len(rows)] = rows

    def need(self, indices: NDArray[np.int64]) -> None:
        """Write which rows [num_needed] of the present step are needed, on a CPU."""
        if self.has_adapters:
            self.needed_slots.numpy()[: len(indices)] = self.slots.numpy()[indices]

    def copy_from(self, slots: torch.Tensor, needed: torch.Tensor) -> None:
        """Copy the slots of a step's rows on a device, by launches that a graph can capture.

        Args:
            slots: [num_rows] int32 the slot of each row.
            needed: [num_needed] int64 the rows that are needed.
        """
        self.slots[: len(slots)].copy_(slots)
        torch.index_select(slots, 0, needed, out=self.needed_slots[: len(needed)])
