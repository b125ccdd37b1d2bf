"""The numbers of a tensor in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paged_backend.checkpoint.gguf.header import GgufTensor
from paged_backend.values.errors import ConfigError
from paged_backend.values.regular_file import open_regular

if TYPE_CHECKING:
    from paged_backend.checkpoint.gguf.block_type import Floats

_CHUNK_BYTES = 2**22  # read and converted at once; rows are never divided


def read_values(path: Path, tensor: GgufTensor) -> Floats:
    """Read a tensor as float32, as the library `gguf` converts it.

    Raises:
        ConfigError: the file ends too soon, or a number is not finite.
    """
    columns = tensor.shape[-1]
    row_bytes = columns // tensor.kind.size * tensor.kind.num_bytes
    values: Floats = np.empty((tensor.num_bytes // row_bytes, columns), np.float32)
    step = max(1, _CHUNK_BYTES // row_bytes)
    with open_regular(path) as stream:
        stream.seek(tensor.offset)
        for first in range(0, len(values), step):
            rows = values[first : first + step]
            data = stream.read(len(rows) * row_bytes)
            if len(data) < len(rows) * row_bytes:
                raise ConfigError(f"{path}: tensor {tensor.name} ends beyond the file")
            stored = np.frombuffer(data, np.uint8).reshape(len(rows), row_bytes)
            rows[:] = tensor.kind.dequantize(stored)
            if not np.isfinite(rows).all():
                raise ConfigError(
                    f"{path}: tensor {tensor.name} ({tensor.kind.name}) must hold finite numbers"
                )
    return values.reshape(tensor.shape)
