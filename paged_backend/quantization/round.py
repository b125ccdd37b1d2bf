"""Rounding of weights to a number format, without calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.quantization.weight import QuantizedWeight

FP8 = torch.float8_e4m3fn


class Rounding(Protocol):
    """Rounds a weight, with scales from the largest absolute values."""

    def quantize(self, weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
        """Return the quantized weight [outputs, inputs], with scales in a dtype."""
        ...


@dataclass(frozen=True, slots=True)
class IntegerRounding:
    """Rounding to the nearest integer from -2**(bits - 1) to 2**(bits - 1) - 1.

    The scales are the same as compressed-tensors': the largest value of a group lies in the middle
    between the largest numbers of both signs.

    Attributes:
        bits: bits of a value, 2 to 8.
        group_size: inputs that share a scale; 0 stands for all.
    """

    bits: int
    group_size: int = 0

    def quantize(self, weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
        """See `Rounding.quantize`."""
        outputs, inputs = weight.shape
        group_size = self.group_size or inputs
        groups = F.pad(weight.float(), (0, -inputs % group_size)).view(outputs, -1, group_size)
        limit = 2 ** (self.bits - 1)
        scales = _scales(groups.abs().amax(2), limit - 0.5, scale_dtype)
        values = (groups / scales.float().unsqueeze(2)).round_().clamp_(-limit, limit - 1)
        values = values.to(torch.int8).view(outputs, -1)[:, :inputs].contiguous()
        return QuantizedWeight(values, scales, (1, group_size))


@dataclass(frozen=True, slots=True)
class Fp8Rounding:
    """Rounding to float8_e4m3fn, with a scale for each output."""

    def quantize(self, weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
        """See `Rounding.quantize`."""
        weight = weight.float()
        largest = torch.finfo(FP8).max
        scales = _scales(weight.abs().amax(1, keepdim=True), largest, scale_dtype)
        values = (weight / scales.float()).clamp_(-largest, largest).to(FP8)
        return QuantizedWeight(values, scales, (1, weight.shape[1]))


def _scales(largest: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """Scales that bring the largest values to `limit`; 1 where all values are zero."""
    scales = (largest / limit).to(dtype)
    return torch.where(scales == 0, 1.0, scales)
