"""The types of tensors in GGUF files, and their conversion to float32 by the library `gguf`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf.constants import GGMLQuantizationType

    Bytes = npt.NDArray[np.uint8]
    Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type that stores rows as blocks of `size` numbers in `num_bytes` bytes."""

    name: str
    size: int
    num_bytes: int

    def dequantize(self, rows: Bytes) -> Floats:
        """Convert stored rows [rows, bytes] to numbers [rows, columns]."""
        import numpy as np  # processes that only read tokenizers start without it
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # the caller checks for numbers that are not finite
            return dequantize(rows, _library_type(self.name)).astype(np.float32, copy=False)


@functools.cache
def block_type(number: int) -> BlockType | None:
    """Return the type with a number in GGUF files; None if the library does not know it."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return None
    return BlockType(kind.name, *GGML_QUANT_SIZES[kind])


@functools.cache
def can_dequantize(kind: BlockType) -> bool:
    """Return whether the library can convert a type; it cannot convert integers, for example."""
    import numpy as np

    try:
        kind.dequantize(np.zeros((1, kind.num_bytes), np.uint8))
    except NotImplementedError:
        return False
    return True


def _library_type(name: str) -> GGMLQuantizationType:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType[name]
