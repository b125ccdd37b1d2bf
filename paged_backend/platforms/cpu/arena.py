"""Memory for the activations of captured steps, which stays at its addresses."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from paged_backend.platforms.cpu.memory import zeros

_ALIGNMENT = 64  # bytes of a cache line


class ArenaFull(Exception):
    """No gap is large enough."""


class Arena:
    """Memory in which tensors take the place of earlier ones that are gone.

    Args:
        num_bytes: its size; pages are taken from the system when they are first written.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = zeros((num_bytes,), torch.uint8).numpy()
        self._taken: dict[int, int] = {}  # the end of each part by its beginning

    def restart(self) -> None:
        """Let the next tensors overwrite all that exist."""
        self._taken = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor with memory that is taken until the last view of it is gone.

        Raises:
            ArenaFull: there is no room.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        taken_bytes = max(num_bytes, 1)  # else an empty tensor would begin where another one does
        begin = self._find(taken_bytes)
        part = self._memory[begin : begin + num_bytes]
        taken = self._taken
        taken[begin] = begin + taken_bytes
        # The tensor's storage keeps the array alive.
        weakref.finalize(part, taken.pop, begin, None)
        return torch.from_numpy(part).view(dtype).view(shape)

    def _find(self, num_bytes: int) -> int:
        """Return the beginning of the first gap of this size."""
        begin = 0
        for taken_begin, taken_end in sorted(self._taken.items()):
            if begin + num_bytes <= taken_begin:
                return begin
            begin = -(-taken_end // _ALIGNMENT) * _ALIGNMENT
        if begin + num_bytes > len(self._memory):
            raise ArenaFull
        return begin
