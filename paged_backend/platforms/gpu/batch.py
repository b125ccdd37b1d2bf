"""The inputs of a step on the device, in buffers with addresses that never change.

Everything that changes with each step is sent in one copy from pinned memory. Block tables stay on
the device, with a row for each running sequence; only new blocks are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.platforms.gpu.transfer import Transfer

_NUM_HOSTS = 8  # host buffers: passes of a draft model are sent while a step is in flight
_ALIGNMENT = 256  # bytes, of each part of a buffer
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64}


class Rows:
    """Assigns a row of the device's buffers to each running sequence; the last row is padding."""

    def __init__(self, num_seqs: int) -> None:
        self.padding = num_seqs
        self._free = list(range(num_seqs - 1, -1, -1))
        self._by_seq: dict[int, int] = {}

    def __getitem__(self, seq_id: int) -> int:
        """Return the sequence's row; a sequence without a row gets a free one."""
        if seq_id not in self._by_seq:
            self._by_seq[seq_id] = self._free.pop()
        return self._by_seq[seq_id]

    def release(self, seq_ids: Iterable[int]) -> None:
        """Free the rows of sequences that have one."""
        self._free += [self._by_seq.pop(seq_id) for seq_id in seq_ids if seq_id in self._by_seq]


class Staging:
    """Named arrays of fixed capacity that are sent to the device together.

    There are several host buffers: some may still be in transfer while another one is filled. The
    device copies a buffer after everything that was launched before.
    """

    def __init__(self, parts: Mapping[str, tuple[torch.dtype, int]], transfer: Transfer) -> None:
        self._transfer = transfer
        self._offsets: dict[str, tuple[torch.dtype, int, int]] = {}
        total = 0
        for name, (dtype, capacity) in parts.items():
            self._offsets[name] = (dtype, total, capacity)
            total += -(-capacity * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        size = torch.Size([total])
        self._hosts = [transfer.host_buffer(size, torch.uint8) for _ in range(_NUM_HOSTS)]
        self._sent: list[torch.Event | None] = [None] * _NUM_HOSTS
        self._device_bytes = torch.zeros(total, dtype=torch.uint8, device=transfer.device)
        self._turn = 0

    def send(self, values: Mapping[str, NDArray[np.int32] | NDArray[np.int64]]) -> None:
        """Fill the first elements of each part, and start the copy."""
        self._turn = (self._turn + 1) % _NUM_HOSTS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        host = self._hosts[self._turn].numpy()
        for name, array in values.items():
            dtype, offset, _ = self._offsets[name]
            end = offset + len(array) * dtype.itemsize
            host[offset:end].view(_NUMPY[dtype])[:] = array
        self._device_bytes.copy_(self._hosts[self._turn], non_blocking=True)
        self._sent[self._turn] = self._transfer.record()

    def part(self, name: str, length: int) -> Tensor:
        """Return the first elements of a part on the device; the memory is always the same."""
        dtype, offset, _ = self._offsets[name]
        return self._device_bytes[offset : offset + length * dtype.itemsize].view(dtype)


class BlockTables:
    """The block tables of each row's sequence, interleaved as in `ScheduledSequence`.

    `tensor` is [num_rows, max_blocks * num_groups] int32. Entries after a sequence's last block are
    stale, and are not used. With several groups, `max_blocks` is rounded up, so that the table of
    each group begins at a multiple of 16 bytes. With `max_blocks` 0, nothing is kept.
    """

    def __init__(self, num_rows: int, max_blocks: int, num_groups: int, transfer: Transfer) -> None:
        self._transfer = transfer
        self._num_groups = num_groups
        if num_groups > 1:
            max_blocks = -(-max_blocks // 4) * 4
        self.tensor = torch.zeros(
            num_rows, max_blocks * num_groups, dtype=torch.int32, device=transfer.device
        )

    def select(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the block tables of rows [num_seqs] int64: [num_seqs, max_blocks] by group."""
        num_blocks = self.tensor.shape[1] // self._num_groups
        tables = self.tensor.index_select(0, rows).view(len(rows), num_blocks, self._num_groups)
        return tables.permute(2, 0, 1).contiguous().unbind()

    def update(self, scheduled_batch: ScheduledBatch, rows: NDArray[np.int64]) -> None:
        """Send the blocks that the sequences of a step got since their last step.

        Args:
            scheduled_batch: the step.
            rows: [num_seqs] the rows of its sequences.
        """
        width = self.tensor.shape[1]
        if not width:
            return
        places: list[int] = []
        block_ids: list[int] = []
        continued = scheduled_batch.continued
        for place in continued.entering:
            table = continued.sequences[place].block_ids
            end = int(rows[place]) * width + len(table)
            places += range(end - self._num_groups, end)
            block_ids += table[-self._num_groups :]
        others = rows[len(continued.sequences) :].tolist()
        for item, row in zip(scheduled_batch.scheduled, others, strict=True):
            first, end = item.first_new_block, len(item.block_ids)
            places += range(row * width + first, row * width + end)
            block_ids += item.block_ids[first:]
        if places:
            index = self._transfer.send(np.array(places, np.int64))
            values = self._transfer.send(np.array(block_ids, np.int32))
            self.tensor.view(-1).index_copy_(0, index, values)
