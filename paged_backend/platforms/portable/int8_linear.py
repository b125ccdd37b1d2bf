"""Linear layers with int8 weights in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.quantization.weight import QuantizedWeight

_LARGEST = 127


class TorchInt8Linear:
    """An int8 weight [outputs, inputs] with a scale for each output, in the form `W8A8_INT8`.

    See :class:`~paged_backend.models.linear.Int8Product`. The reference of other implementations:
    rows are rounded to int8, sums are exact, and results are ``sum * (row's scale * output's
    scale)`` in float32.

    Args:
        weight: weight on the device that computes.
        bias: [outputs] in any float type.
        dtype: dtype of hidden states.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weight = weight.values
        self._scales = weight.channel_scales().clone(memory_format=torch.contiguous_format)
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        return self.scaled(self.sums(x), x.abs().amax(1), self._bias)

    def sums(self, x: Tensor) -> Tensor:
        """See `Int8Product.sums`."""
        values, _ = quantize_rows(x)
        sums = values.double() @ self._weight.t().double()  # exact: they are far below 2**53
        return sums.to(torch.int32)

    def scaled(self, sums: Tensor, peaks: Tensor, bias: Tensor | None) -> Tensor:
        """See `Int8Product.scaled`."""
        out = sums.float() * ((peaks.float() / _LARGEST).unsqueeze(1) * self._scales)
        return (out if bias is None else out + bias).to(self._dtype)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        return (self._weight[index] * self._scales[index].unsqueeze(1)).to(self._dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of `x` [rows, inputs] to int8; returns the values and scales [rows] float32.

    The largest absolute value of a row becomes 127. The scale of a row of zeros is 0.
    """
    # Products of float32 values are exact in float64, so each value is rounded once.
    largest = x.double().abs().amax(1)
    factors = torch.where(largest == 0, 0.0, _LARGEST / largest).float().double()
    values = (x.double() * factors.unsqueeze(1)).round().to(torch.int8)
    return values, (largest / _LARGEST).float()
