"""The interface of a weight format: how a checkpoint stores the weight of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paged_backend.checkpoint.stored_tensor import StoredType
from paged_backend.quantization.forms import Encoding
from paged_backend.quantization.weight import QuantizedWeight

BLOCKS = "model.layers."  # begins the names of the layers in the decoder's blocks
EMBEDDING = "model.embed_tokens"  # the layer's name if it is also the output layer


class FormatError(ValueError):
    """A stored tensor has values that contradict the format; the text names the tensor's suffix."""


class WeightFormat(Protocol):
    """Reads weights of one format; formats that are equal store weights in the same way."""

    @property
    def encoding(self) -> Encoding:
        """Return the kind of numbers that weights have when they are read."""
        ...

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """Return the stored tensors, by suffix, of a weight of this size."""
        ...

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """Return the weight that stored tensors stand for.

        Args:
            stored: the tensors, by suffix, with the checked shapes and dtypes; some of the
                optional ones may be missing.
            outputs: number of the weight's rows.
            inputs: number of its columns.

        Raises:
            FormatError: a tensor's values contradict the format.
        """
        ...


def _unknown(layer: str) -> WeightFormat | None:
    return None


@dataclass(frozen=True, slots=True)
class Quantization:
    """Describes how a checkpoint is quantized.

    Attributes:
        method: the value of ``quant_method`` in config.json.
        format_of: returns the format of the linear layer with a name; None if it is not quantized.
        kv_cache_dtype: the option ``kv_cache_dtype`` that the checkpoint is made for.
        converted: returns the format of a layer if it is quantized in spite of the lists of layers
            in the configuration; None if the configuration does not say.
    """

    method: str
    format_of: Callable[[str], WeightFormat | None]
    kv_cache_dtype: str = "auto"
    converted: Callable[[str], WeightFormat | None] = _unknown


def blocks_of(block: tuple[int, int], outputs: int, inputs: int) -> tuple[int, int]:
    """Return the number of blocks in both dimensions of a weight, those at the edges included."""
    return -(-outputs // block[0]), -(-inputs // block[1])
