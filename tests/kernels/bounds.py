"""Finds reads and writes of interpreted kernels outside of their arguments.

A GPU reports these only where no memory is mapped, and a neighbor that nobody looks at hides them
from tests of values. Masked addresses may be anything, as on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


class Bounds:
    """The memory from the first to the last element of each tensor of the current launch."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int]] = []  # first address, and the one after the last

    def of_launch(self, arguments: Any) -> None:
        """Replace the tensors by those of a launch."""
        self._pieces = [_piece(each) for each in _tensors(arguments) if each.numel()]

    def check(self, pointers: TensorHandle, mask: TensorHandle | None = None) -> None:
        """Check that the addresses that a mask selects are within the tensors.

        Raises:
            AssertionError: an address is not.
        """
        addresses = pointers.data if mask is None else pointers.data[mask.data.astype(bool)]
        if not addresses.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
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
    copied = GridExecutor._init_args_hst

    def noted(self: GridExecutor, *arguments: Any) -> Any:
        copies = copied(self, *arguments)
        bounds.of_launch(copies)
        return copies

    GridExecutor._init_args_hst = noted
    for name, (pointers, mask) in _OPERATIONS.items():
        original = getattr(InterpreterBuilder, name)
        setattr(InterpreterBuilder, name, _checked(bounds, original, pointers, mask))


# The indices of the pointers and of their mask, if any, among the operands.
_OPERATIONS: dict[str, tuple[int, int | None]] = {
    "create_masked_load": (0, 1),
    "create_masked_store": (0, 2),
    "create_atomic_rmw": (1, 3),
    "create_atomic_cas": (0, None),
}


def _checked(bounds: Bounds, original: Any, pointers: int, mask: int | None) -> Any:
    """Check the addresses of an operation before it runs."""

    def operate(self: InterpreterBuilder, *operands: Any) -> Any:
        bounds.check(operands[pointers], None if mask is None else operands[mask])
        return original(self, *operands)

    return operate


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
