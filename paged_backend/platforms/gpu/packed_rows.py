"""Arrays on the device with a row for each running sequence; rows are sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.platforms.gpu.transfer import Transfer

_ALIGNMENT = 64  # words of 4 bytes, of each array
_TORCH = {
    np.dtype("<f4"): torch.float32,
    np.dtype("<i4"): torch.int32,
    np.dtype("<i8"): torch.int64,
}


class PackedRows:
    """One array for each field of a record, all in one buffer and filled with zeros.

    Args:
        record: a structured dtype without padding; fields are <f4, <i4, <i8, or vectors of these.
        num_rows: number of rows of each array.
        transfer: copies records to the device.
    """

    def __init__(self, record: np.dtype[np.void], num_rows: int, transfer: Transfer) -> None:
        self._transfer = transfer
        self._record = record
        first: list[int] = []  # the place of each word of a record in row 0
        step: list[int] = []  # from there to the place in the next row
        self._arrays: dict[str, tuple[int, int]] = {}
        total = 0
        for name in record.names or ():
            words = record[name].itemsize // 4
            first += range(total, total + words)
            step += [words] * words
            self._arrays[name] = total, total + words * num_rows
            total += -(-words * num_rows // _ALIGNMENT) * _ALIGNMENT
        self._first, self._step = np.array(first), np.array(step)
        self._words = torch.zeros(total, dtype=torch.int32, device=transfer.device)

    def array(self, name: str) -> Tensor:
        """Return the array of a field: [num_rows], or [num_rows, length] if it is a vector."""
        begin, end = self._arrays[name]
        kind = self._record[name]
        return self._words[begin:end].view(_TORCH[kind.base]).view(-1, *kind.shape)

    def replace(self, rows: Sequence[int], records: NDArray[np.void]) -> None:
        """Replace these rows of all arrays by records [len(rows)]: one copy and one launch."""
        places = (self._first + np.array(rows)[:, None] * self._step).ravel()
        words = np.resize(records.view(np.int32), len(places) + len(places) % 2)
        sent = self._transfer.send(np.concatenate((places, words.view(np.int64))))
        index, values = sent[: len(places)], sent[len(places) :].view(torch.int32)
        self._words.index_copy_(0, index, values[: len(places)])
