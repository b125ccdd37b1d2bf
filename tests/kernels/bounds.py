"""Finds reads and writes of interpreted kernels outside of their arguments.

A GPU reports these only where no memory is mapped, and a neighbor that nobody looks at hides them
from tests of values. Masked addresses may be anything, as on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor


class Bounds:
    """The memory from the first to the last element of each tensor of the current launch."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int]] = []  # first address, and the one after the last

    def of_launch(self, arguments: Any) -> None:
        """Replace the tensors by those of a launch."""
        self._pieces = [_piece(each) for each in _tensors(arguments) if each.numel()]

    def check(self, addresses: np.ndarray, size: int, mask: np.ndarray | None = None) -> None:
        """Check that the numbers at the addresses that a mask selects are within the tensors.

        Args:
            addresses: those of the first bytes.
            size: bytes of a number.
            mask: one for each address; None for all.

        Raises:
            AssertionError: a number is not.
        """
        if mask is not None:
            addresses = addresses[mask if mask.dtype == np.bool_ else mask.astype(bool)]
        if not addresses.size:
            return
        if addresses.size == 1:
            first = addresses.item()
            last = first + size
        else:
            first, last = int(addresses.min()), int(addresses.max()) + size
        if any(begin <= first and last <= end for begin, end in self._pieces):
            return
        found = np.zeros(addresses.shape, bool)
        for begin, end in self._pieces:
            found |= (addresses >= begin) & (addresses <= end - size)
        assert found.all(), f"addresses outside of all arguments: {(~found).sum()}"


def check_bounds() -> None:
    """Patch the interpreter of this process so that it checks each address."""
    bounds = Bounds()
    launch = GridExecutor.__call__

    def noted(self: GridExecutor, *arguments: Any, **named: Any) -> None:
        bounds.of_launch((arguments, named))
        launch(self, *arguments, **named)

    GridExecutor.__call__ = noted
    interpreter._interpreter = _CheckedMemory(bounds)


class _CheckedMemory:
    """The interpreter's accesses to memory, each after a check of its addresses."""

    def __init__(self, bounds: Bounds) -> None:
        self._check, self._memory = bounds.check, interpreter._interpreter

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(addresses, np.dtype(dtype).itemsize, mask)
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._check(addresses, values.dtype.itemsize, mask)
        return self._memory.store(addresses, values, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, values: Any, mask: Any, order: Any) -> Any:
        self._check(addresses, values.dtype.itemsize, mask)
        return self._memory.atomic_rmw(operation, addresses, values, mask, order)

    def atomic_cas(self, addresses: Any, expected: Any, values: Any, order: Any) -> Any:
        self._check(addresses, values.dtype.itemsize)
        return self._memory.atomic_cas(addresses, expected, values, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _tensors(list(arguments.values()))
    elif isinstance(arguments, (list, tuple)):
        for each in arguments:
            yield from _tensors(each)


def _piece(tensor: torch.Tensor) -> tuple[int, int]:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
