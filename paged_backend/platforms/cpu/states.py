"""What the kernels of layers that keep a state per sequence share: the layout of a step.

All take the rows of all sequences, one sequence after the other, and

- `pool` [num_slots, ...], the states;
- `slots` [num_seqs, 2] int32, the slot that a state is read from and the one that it is written
  to. Slot 0 is read as zeros, and never written;
- `query_start_loc` [num_seqs + 1] int32, the first row of each sequence, and the number of rows.
  A sequence without rows is skipped.

A state is computed row by row, and each of its numbers in one order, so results depend neither on
the steps into which a text is divided nor on the other sequences. LLVM may compile the first row of
a loop apart from the others, or a loop twice, for memory that overlaps or does not. With fast math
these copies may round differently, so what a row computes is an `exact_function`, or emitted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from paged_backend.platforms.cpu.threads import device_function, floats, ints
from paged_backend.platforms.cpu.tiles import LANES, emit_prefetch

_LINE = LANES * 4  # bytes of a cache line, and of a vector


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor of which each row is contiguous; rows may be apart from each other."""
    return tensor if tensor[:1].is_contiguous() else tensor.contiguous()


def check_pool(pool: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Check that a kernel can read states.

    Raises:
        ValueError: they have another dtype than this one, or are not contiguous.
    """
    if pool.dtype != dtype or not pool.is_contiguous():
        raise ValueError(f"pool must be contiguous {dtype}, got {pool.dtype}, {pool.stride()}")


@device_function
def sequence_at(query_start_loc: int, slots: int, seq: int) -> Any:
    """Return a sequence's first row, the row after its last one, and the slots of its state.

    The slots are the one to read from, and the one to write to. The arguments are addresses and
    the number of the sequence.
    """
    rows, places = ints(query_start_loc + seq * 4, 2), ints(slots + seq * 8, 2)
    return np.int64(rows[0]), np.int64(rows[1]), np.int64(places[0]), np.int64(places[1])


@device_function
def aligned(memory: Any) -> Any:
    """Return the address of the first whole cache line of an array.

    Vectors that lie in two lines take twice as long. A line less fits in the array.
    """
    return (np.int64(memory.ctypes.data) + _LINE - 1) // _LINE * _LINE


@device_function
def part_of(pool_at: int, slot: int, num_parts: int, part: int, size: int) -> Any:
    """Return the address of a part of a slot in a pool of parts of `size` float32 each."""
    return pool_at + ((slot * num_parts + part) * size) * 4


@device_function
def begin(source: int, target: int, size: int, slot: int) -> Any:
    """Return the address to read `size` float32 of a state from, for the first row.

    It is the source, or the target after it was filled with zeros, if the source is slot 0.
    """
    if slot != 0:
        return source
    fill(target, size)
    return target


@device_function
def copy(target: int, source: int, size: int) -> None:
    """Copy `size` float32 from an address to another one."""
    numbers, copies = floats(source, size), floats(target, size)
    for i in range(size):
        copies[i] = numbers[i]


@device_function
def fill(target: int, size: int) -> None:
    """Store `size` zeros in float32 at an address."""
    numbers = floats(target, size)
    for i in range(size):
        numbers[i] = 0


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _prefetch(context: Any, address: Any) -> Any:
    """Begin to load the cache line at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@device_function
def prefetch(source: int, size: int) -> None:
    """Begin to load `size` float32 at an address, of which a cache line has LANES."""
    for i in range(0, size, LANES):
        _prefetch(source + i * 4)
