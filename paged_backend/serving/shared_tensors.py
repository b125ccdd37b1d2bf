"""Tensors that many responses share, because they have the same small value.

Most outputs of a streamed response have values that were sent before: a count, no finish reason,
the text of a common token.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from paged_backend.serving.contract import Array

MAX_TENSORS = 2048  # half a megabyte of shared memory
MAX_BYTES = 64

T = TypeVar("T")


class SharedTensors(Generic[T]):
    """Makes the tensors of responses, and returns the same tensor again for the same small value.

    When a tensor is sent for the first time, the server's interface copies it to shared memory;
    later responses with this tensor refer to the copy. Two threads must not make the copy at the
    same time, so only one thread gets shared tensors.

    Args:
        make: makes new tensors of outputs.
        thread: the thread that gets shared tensors; the others get new ones.
    """

    def __init__(
        self, make: Callable[[Mapping[str, Array]], list[T]], thread: threading.Thread
    ) -> None:
        self._make = make
        self._thread = thread
        # Tensors by name, dtype, shape and value, in the order of their last use.
        self._tensors: OrderedDict[tuple[str, str, tuple[int, ...], bytes], T] = OrderedDict()

    def make(self, arrays: Mapping[str, Array]) -> list[T]:
        """Return the tensors of these outputs."""
        if threading.current_thread() is not self._thread:
            return self._make(arrays)
        return [self._shared(name, array) for name, array in arrays.items()]

    def close(self) -> None:
        """Release the tensors, after the thread has ended and before the interface is closed."""
        self._tensors.clear()

    def _shared(self, name: str, array: Array) -> T:
        value = _small_value(array)
        if value is None:
            return self._make({name: array})[0]
        key = name, array.dtype.char, array.shape, value
        tensor = self._tensors.get(key)
        if tensor is not None:
            self._tensors.move_to_end(key)
            return tensor
        (tensor,) = self._make({name: array})
        self._tensors[key] = tensor
        if len(self._tensors) > MAX_TENSORS:
            self._tensors.popitem(last=False)
        return tensor


def _small_value(array: Array) -> bytes | None:
    """Return the bytes of an array with one small element; None for any other array."""
    if array.size != 1:
        return None
    value: bytes = array.item() if array.dtype.char == "O" else array.tobytes()
    return value if len(value) <= MAX_BYTES else None
