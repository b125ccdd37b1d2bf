"""Tensors of Triton's interpreter that are made without the checks of its constructors."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_BLOCKS: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}


@functools.cache
def shape_of(sizes: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    """The number of elements and the shape of a block of these sizes, the same for equal sizes."""
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def tensor_of(numbers: np.ndarray, kind: Any, block: Any) -> tl.tensor:
    """A tensor of these numbers, without the checks of the constructors.

    Args:
        numbers: [1] for a scalar, else the block's.
        kind: the type of an element.
        block: the type of the tensor, which is `kind` for a scalar.
    """
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = numbers, kind, {}
    found = object.__new__(tl.tensor)
    found.handle, found.type, found.dtype = handle, block, kind
    found.numel, found.shape = shape_of(() if block is kind else numbers.shape)
    return found


def block_of(kind: Any, sizes: tuple[int, ...]) -> tl.block_type:
    """The type of a block with elements of a type."""
    key = kind.name, sizes
    if key not in _BLOCKS:
        _BLOCKS[key] = tl.block_type(kind, list(sizes))
    return _BLOCKS[key]
