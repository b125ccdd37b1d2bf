"""The interface of a checkpoint's files: tensors by the names that Hugging Face gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor


class SourceTensor(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    tensor: Tensor
    origin: str  # names the file and the tensor in messages
    num_bytes: int  # in the file


class TensorSource(Protocol):
    """Reads the tensors of a checkpoint one after another, so that one at a time is in memory."""

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        ...

    def __iter__(self) -> Iterator[SourceTensor]:
        """Yield each tensor.

        Raises:
            ConfigError: a file is damaged.
        """
        ...
