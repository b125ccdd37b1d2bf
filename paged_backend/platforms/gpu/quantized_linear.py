"""Products with weights that stay quantized, as Triton kernels; see `WeightForm`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from paged_kernels.block_scaled_matmul import BLOCK_SIZE, block_scaled_matmul
from paged_kernels.int4 import unpack_int4
from paged_kernels.packed_words import pack_words, unpack_words
from paged_kernels.quantize_rows import quantize_rows
from paged_kernels.scaled_matmul import scaled_matmul
from paged_kernels.w4a16_matmul import w4a16_matmul
from paged_kernels.w8a16_matmul import w8a16_matmul
from torch import Tensor

from paged_backend.models.linear import LinearProduct
from paged_backend.quantization.bits import pack_int4
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight

_FP8 = torch.float8_e4m3fn
_SIGN = 0x80  # flips int8 to numbers from 0 to 255 in the same order, and back


def weight_forms(dtype: torch.dtype, *, fp8: bool) -> tuple[WeightForm, ...]:
    """Return the forms that kernels multiply.

    Args:
        dtype: dtype of hidden states.
        fp8: whether the device multiplies float8_e4m3fn.
    """
    forms = [WeightForm.W8A8_INT8]
    if fp8:
        forms += [WeightForm.W8A8_FP8, WeightForm.W8A8_FP8_BLOCKS]
    if dtype != torch.float32:
        forms += [WeightForm.W8A16_INT8, WeightForm.W8A16_FP8, WeightForm.W4A16]
    return tuple(forms)


def quantized_product(
    form: WeightForm,
    weight: QuantizedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> LinearProduct:
    """Bring a weight into a form, with copies of all tensors on the device.

    Args:
        form: one that the weight's encoding has.
        weight: [outputs, inputs].
        bias: [outputs] floats.
        dtype: dtype of hidden states.
        device: where the kernels run.
    """
    return _PRODUCTS[form](weight, bias, dtype, device)


class _TritonLinear(ABC):
    """The base of products; see :class:`~paged_backend.models.linear.LinearProduct`."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bias = None if bias is None else _placed(bias.to(dtype), device)
        self._dtype = dtype
        self._place(weight, device)

    @abstractmethod
    def _place(self, weight: QuantizedWeight, device: torch.device) -> None:
        """Copy the weight to the device in the form that the kernel reads."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        return self._rows(index).dequantize().to(self._dtype)

    @abstractmethod
    def _rows(self, index: Tensor) -> QuantizedWeight:
        """Return the weight's rows at `index`."""


class RowScaledLinear(_TritonLinear):
    """int8 or FP8 with a scale for each output; inputs have one for each row."""

    def _place(self, weight: QuantizedWeight, device: torch.device) -> None:
        self._values = _placed(weight.values, device)
        self._scales = _placed(weight.channel_scales(), device)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        values, scales = quantize_rows(x.contiguous(), self._values.dtype)
        return scaled_matmul(
            values, scales, self._values, self._scales, self._bias, out_dtype=self._dtype
        )

    def _rows(self, index: Tensor) -> QuantizedWeight:
        values = self._values.view(torch.int8)[index].view(self._values.dtype)
        return QuantizedWeight(values, self._scales[index].unsqueeze(1), (1, values.shape[1]))


class BlockScaledLinear(_TritonLinear):
    """FP8 with a scale for each 128 x 128 numbers; inputs have one for each 128 of a row."""

    def _place(self, weight: QuantizedWeight, device: torch.device) -> None:
        self._values = _placed(weight.values, device)
        self._scales = _placed(weight.scales.float(), device)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        values, scales = quantize_rows(x.contiguous(), _FP8, group_size=BLOCK_SIZE)
        return block_scaled_matmul(
            values, scales, self._values, self._scales, self._bias, out_dtype=self._dtype
        )

    def _rows(self, index: Tensor) -> QuantizedWeight:
        values = self._values.view(torch.int8)[index].view(_FP8)
        return QuantizedWeight(values, self._scales[index // BLOCK_SIZE], (1, BLOCK_SIZE))


class _PackedLinear(_TritonLinear):
    """Numbers in 32-bit words with scales for groups of inputs or whole rows; inputs stay 16-bit.

    If a checkpoint has groups of inputs that are not neighbors (act-order), the weight's columns
    are sorted by their groups, and so are the columns of each input before they are multiplied.
    """

    def _place(self, weight: QuantizedWeight, device: torch.device) -> None:
        self._order = None if weight.groups is None else _placed(weight.order(), device)
        weight = weight.in_order().with_row_scales()
        self._inputs = weight.values.shape[1]
        self._group_size = -1 if weight.block[1] >= self._inputs else weight.block[1]
        self._scales = _placed(weight.scales, device)
        self._packed = _placed(pack_words(self._stored(weight.values), self._bits), device)
        zeros = None if weight.zeros is None else self._packed_zeros(weight.zeros)
        self._zeros = None if zeros is None else _placed(zeros, device)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        x = x.contiguous() if self._order is None else x[:, self._order]
        return self._multiply(
            x,
            self._packed,
            self._scales,
            group_size=self._group_size,
            zero_points=self._zeros,
            bias=self._bias,
        )

    def _rows(self, index: Tensor) -> QuantizedWeight:
        values = self._numbers(unpack_words(self._packed[index], self._bits, self._inputs))
        if self._order is not None:
            values = values[:, self._order.argsort()]
        num_groups = self._scales.shape[1]
        zeros = self._zeros
        if zeros is not None:
            zeros = self._unpacked_zeros(zeros[index], num_groups)
        columns = self._inputs if self._group_size == -1 else self._group_size
        groups = None if self._order is None else self._order.argsort() // columns
        return QuantizedWeight(values, self._scales[index], (1, columns), zeros, groups)

    @property
    @abstractmethod
    def _bits(self) -> int:
        """The bits of a stored number."""

    @abstractmethod
    def _multiply(self, x: Tensor, packed: Tensor, scales: Tensor, **options: Any) -> Tensor:
        """Call the kernel."""

    @abstractmethod
    def _stored(self, numbers: Tensor) -> Tensor:
        """Return what is stored for numbers or zero points, as uint8."""

    @abstractmethod
    def _numbers(self, stored: Tensor) -> Tensor:
        """Return the numbers or zero points that are stored so."""

    def _packed_zeros(self, zeros: Tensor) -> Tensor:
        stored = self._stored(zeros)
        return pack_int4(stored) if self._bits == 4 else _words(stored)

    def _unpacked_zeros(self, packed: Tensor, count: int) -> Tensor:
        if self._bits == 4:
            return self._numbers(unpack_int4(packed, count))
        return self._numbers(packed.view(torch.uint8)[:, :count])


class Int4Linear(_PackedLinear):
    """Integers of at most 4 bits."""

    _bits = 4

    def _multiply(self, x: Tensor, packed: Tensor, scales: Tensor, **options: Any) -> Tensor:
        return w4a16_matmul(x, packed, scales, **options)

    def _stored(self, numbers: Tensor) -> Tensor:
        return (numbers + 8).view(torch.uint8)

    def _numbers(self, stored: Tensor) -> Tensor:
        return stored.view(torch.int8) - 8


class Int8Linear(_PackedLinear):
    """Integers of 5 to 8 bits."""

    _bits = 8

    def _multiply(self, x: Tensor, packed: Tensor, scales: Tensor, **options: Any) -> Tensor:
        return w8a16_matmul(x, packed, scales, **options)

    def _stored(self, numbers: Tensor) -> Tensor:
        return numbers.view(torch.uint8) ^ _SIGN

    def _numbers(self, stored: Tensor) -> Tensor:
        return (stored ^ _SIGN).view(torch.int8)


class Fp8Linear(_PackedLinear):
    """Numbers in float8_e4m3fn."""

    _bits = 8

    def _multiply(self, x: Tensor, packed: Tensor, scales: Tensor, **options: Any) -> Tensor:
        return w8a16_matmul(x, packed, scales, float8=True, **options)

    def _stored(self, numbers: Tensor) -> Tensor:
        return numbers.view(torch.uint8)

    def _numbers(self, stored: Tensor) -> Tensor:
        return stored.view(_FP8)


_PRODUCTS: dict[WeightForm, type[_TritonLinear]] = {
    WeightForm.W8A8_INT8: RowScaledLinear,
    WeightForm.W8A8_FP8: RowScaledLinear,
    WeightForm.W8A8_FP8_BLOCKS: BlockScaledLinear,
    WeightForm.W4A16: Int4Linear,
    WeightForm.W8A16_INT8: Int8Linear,
    WeightForm.W8A16_FP8: Fp8Linear,
}


def _words(numbers: Tensor) -> Tensor:
    """Pack rows of bytes into int32 words, padded with zeros."""
    return F.pad(numbers, (0, -numbers.shape[1] % 4)).contiguous().view(torch.int32)


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy on the device, in memory of torch, which aligns it."""
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)
