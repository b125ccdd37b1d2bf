"""MXFP4, the format of the experts in gpt-oss: 32 numbers of 4 bits share a power of 2.

OCP Microscaling Formats (MX) Specification, version 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.stored_tensor import StoredType
from paged_backend.quantization.formats import FormatError, Quantization, WeightFormat
from paged_backend.quantization.forms import Encoding
from paged_backend.quantization.layer_names import LayerNames
from paged_backend.quantization.weight import QuantizedWeight

_BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # bias of the exponents
_EXPERTS = ".experts"  # ends the names of the modules that have this format


@dataclass(frozen=True, slots=True)
class Mxfp4Format:
    """A weight in bytes of two numbers each, the first in the low bits, and exponents."""

    encoding = Encoding(torch.float32, (1, _BLOCK), bits=4)

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """See `WeightFormat.tensors`."""
        blocks = outputs, -(-inputs // _BLOCK)
        return {
            "blocks": StoredType((*blocks, _BLOCK // 2), (torch.uint8,)),
            "scales": StoredType(blocks, (torch.uint8,)),
        }

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `WeightFormat.read`."""
        exponents = stored["scales"].int() - _BIAS
        if bool((exponents > _BIAS).any()):
            raise FormatError("scales must be at most 254, as 255 stands for no number")
        packed = stored["blocks"].flatten(1).long()
        table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
        values = table.to(packed.device)[torch.stack((packed & 15, packed >> 4), dim=-1)]
        ones = torch.ones_like(exponents, dtype=torch.float32)
        scales = torch.ldexp(ones, exponents)
        return QuantizedWeight(values.flatten(1)[:, :inputs], scales, (1, _BLOCK))


def read_mxfp4(config: ConfigFile) -> Quantization:
    """Read which layers' experts are quantized.

    Raises:
        ConfigError: a key is wrong.
    """
    skipped = LayerNames.read_wildcards(config, "modules_to_not_convert")

    def format_of(name: str) -> WeightFormat | None:
        parts = name.split(".")
        outer = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        if not name.endswith(_EXPERTS) or any(module in skipped for module in outer):
            return None
        return Mxfp4Format()

    return Quantization("mxfp4", format_of)
