"""Products that round each row of their inputs, where each rank has a part of the row."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.models.division import Group
from paged_backend.models.layers import PlatformKernels
from paged_backend.models.linear import Int8Product, LinearProduct
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight

_ROUNDS_ROWS = (WeightForm.W8A8_INT8, WeightForm.W8A8_FP8)  # with one scale for a row of inputs
_PADDING = 16  # columns; kernels read rows in pieces of 16 bytes


def divided_product(
    form: WeightForm,
    weight: QuantizedWeight,
    bias: Tensor | None,
    kernels: PlatformKernels,
    group: Group | None,
) -> LinearProduct:
    """Make the product of a weight, and of this rank's part of each row of inputs.

    Args:
        form: one of the platform's.
        weight: [outputs, inputs of this rank].
        bias: [outputs] floats.
        kernels: the platform.
        group: the ranks with the other inputs; None if this rank has all of them.
    """
    if group is None or form not in _ROUNDS_ROWS:
        return kernels.quantized_linear(form, weight, bias)
    values = F.pad(weight.values.view(torch.int8), (0, _PADDING)).view(weight.values.dtype)
    rows, columns = weight.block
    padded = replace(weight, values=values, block=(rows, columns + _PADDING))
    return SharedPeakProduct(kernels.quantized_linear(form, padded, bias), group)


class SharedPeakProduct:
    """Rounds a row of inputs as one rank does that has the whole row.

    The scale of a row follows from its largest absolute value. The kernels find that of all ranks
    in one more column of the inputs, which the weight multiplies by zero. See
    :class:`~paged_backend.models.linear.LinearProduct`.

    Args:
        product: its weight has `_PADDING` columns of zeros at the end.
        group: the ranks.
    """

    def __init__(self, product: LinearProduct, group: Group) -> None:
        self._product = product
        self._group = group

    def summed(self, bias: Tensor | None) -> SummedInt8Product | None:
        """Return the product that also adds up the parts of all ranks exactly.

        Returns:
            None if the kernels give no sums of int8 numbers before they are scaled.

        Args:
            bias: [outputs] of this rank, zeros in all ranks but one.
        """
        if not isinstance(self._product, Int8Product):
            return None
        return SummedInt8Product(self._product, bias, self._group)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the part [rows, outputs] of the output, for `x` [rows, inputs of this rank]."""
        return self._product(_with_peaks(x, self._group)[0])

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Refuse: an embedding is not divided along its inputs."""
        raise TypeError("a layer that is divided along its inputs is not an embedding")


class SummedInt8Product:
    """Adds up the int32 sums of all ranks before they are scaled, so that all bits are one rank's.

    See :class:`~paged_backend.models.linear.LinearProduct`; each call returns the whole result.

    Args:
        product: see `SharedPeakProduct`.
        bias: [outputs] of this rank, zeros in all ranks but one.
        group: the ranks.
    """

    def __init__(self, product: Int8Product, bias: Tensor | None, group: Group) -> None:
        self._product = product
        self._bias = None if bias is None else group.sum(bias.float().clone())
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, outputs] for `x` [rows, inputs of this rank]."""
        padded, peaks = _with_peaks(x, self._group)
        sums = self._group.sum(self._product.sums(padded))
        return self._product.scaled(sums, peaks, self._bias)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Refuse: an embedding is not divided along its inputs."""
        raise TypeError("a layer that is divided along its inputs is not an embedding")


def _with_peaks(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return `x` [rows, inputs] with `_PADDING` more columns, and the peaks [rows] of all ranks.

    The first of these columns holds the peaks.
    """
    peaks = group.gather(x.abs().amax(1)).amax(0)
    padded = F.pad(x, (0, _PADDING))
    padded[:, x.shape[1]] = peaks
    return padded, peaks
