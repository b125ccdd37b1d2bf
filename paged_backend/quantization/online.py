"""Formats of weights that are stored in floating point and quantized as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import StoredType
from paged_backend.quantization.forms import Encoding
from paged_backend.quantization.round import FP8, Fp8Rounding, IntegerRounding, Rounding
from paged_backend.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class OnlineFormat:
    """A float weight that is rounded after it has been read.

    Attributes:
        rounding: the number format.
        encoding: see :class:`~paged_backend.quantization.formats.WeightFormat`.
    """

    rounding: Rounding
    encoding: Encoding

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """See `WeightFormat.tensors`."""
        return {"weight": StoredType((outputs, inputs))}

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `WeightFormat.read`."""
        return self.rounding.quantize(stored["weight"])


ONLINE_FORMATS = {
    "int8": OnlineFormat(IntegerRounding(8), Encoding(torch.int8, (1, 0), rounds_inputs=True)),
    "int4": OnlineFormat(IntegerRounding(4, group_size=32), Encoding(torch.int8, (1, 32), bits=4)),
    "fp8": OnlineFormat(Fp8Rounding(), Encoding(FP8, (1, 0), rounds_inputs=True)),
}
"""Formats by the value of the option ``quantization``."""
