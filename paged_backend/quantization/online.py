"""Formats of weights that are stored in floating point and quantized as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from paged_backend.checkpoint.stored_tensor import StoredType
from paged_backend.quantization.round import Fp8Rounding, IntegerRounding, Rounding
from paged_backend.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class OnlineFormat:
    """A float weight that is rounded after it has been read.

    Attributes:
        rounding: the number format.
        int8_activations: see :class:`~paged_backend.quantization.formats.WeightFormat`.
    """

    rounding: Rounding
    int8_activations: bool = False

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """See `WeightFormat.tensors`."""
        return {"weight": StoredType((outputs, inputs))}

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `WeightFormat.read`."""
        return self.rounding.quantize(stored["weight"])


ONLINE_FORMATS = {
    "int8": OnlineFormat(IntegerRounding(8), int8_activations=True),
    "int4": OnlineFormat(IntegerRounding(4, group_size=32)),
    "fp8": OnlineFormat(Fp8Rounding()),
}
"""Formats by the value of the option ``quantization``."""
