"""The forms of quantized weights that kernels multiply, and which formats have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

BLOCK = 128  # rows and columns of a block of FP8 weights that kernels multiply
GROUPS = (32, 64, 128)  # how many inputs may share a scale in the forms with 16-bit inputs
_PACKED_BYTES = 64  # bytes of a block of a row in the forms with 16-bit inputs


class WeightForm(Enum):
    """A form in which kernels multiply a weight without dequantizing it first; values are names.

    W8A8 rounds each row of a layer's input to 8 bits: with a scale for the row, or in blocks with
    one for each 128 elements of it. The other forms do not round inputs.
    """

    W8A8_INT8 = "W8A8 int8"  # a scale for each output
    W8A8_FP8 = "W8A8 fp8"  # a scale for each output
    W8A8_FP8_BLOCKS = "W8A8 fp8 blocks"  # a scale for each block of 128 x 128
    W8A16_INT8 = "W8A16 int8"  # scales, maybe zero points, for groups of inputs or whole rows
    W8A16_FP8 = "W8A16 fp8"  # the same, without zero points
    W4A16 = "W4A16"  # as in int8, with at most 4 bits


_PACKED = (WeightForm.W8A16_INT8, WeightForm.W8A16_FP8, WeightForm.W4A16)


@dataclass(frozen=True, slots=True)
class Encoding:
    """The numbers of a quantized weight, and the elements that share a scale.

    Attributes:
        dtype: dtype of the numbers: torch.int8 or torch.float8_e4m3fn; torch.float32 stands for
            numbers that no kernel multiplies.
        block: (rows, columns) that share a scale; 0 stands for all.
        bits: bits of a number, 2 to 8.
        zero_points: whether each scale has a zero point.
        rounds_inputs: whether the layer's inputs are rounded to `dtype`, too.
    """

    dtype: torch.dtype
    block: tuple[int, int]
    bits: int = 8
    zero_points: bool = False
    rounds_inputs: bool = False

    def forms(self, outputs: Sequence[int], inputs: int) -> tuple[WeightForm, ...]:
        """Return the forms that a layer's weight can be brought into, the best one first.

        Args:
            outputs: the number of outputs of each part that the layer fuses.
            inputs: the number of inputs.
        """
        whole_rows = self._columns(inputs) == inputs
        grouped = whole_rows or self.block[1] in GROUPS
        if self.dtype == torch.int8:
            if self.rounds_inputs:
                return (WeightForm.W8A8_INT8,) if whole_rows and not self.zero_points else ()
            form = WeightForm.W4A16 if self.bits <= 4 else WeightForm.W8A16_INT8
            return (form,) if grouped else ()
        if self.dtype == torch.float32 or self.zero_points or not grouped:
            return ()
        whole_blocks = self.block[0] == BLOCK and not any(size % BLOCK for size in outputs[:-1])
        if self.rounds_inputs and whole_rows:
            return WeightForm.W8A8_FP8, WeightForm.W8A16_FP8
        if self.rounds_inputs and whole_blocks and self.block[1] == BLOCK:
            return WeightForm.W8A8_FP8_BLOCKS, WeightForm.W8A16_FP8
        return (WeightForm.W8A16_FP8,)

    def num_bytes(self, form: WeightForm, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight in a form, with 16-bit scales for groups of integers."""
        numbers = outputs * inputs
        if form in _PACKED:  # in whole blocks of words
            bits = 4 if form is WeightForm.W4A16 else 8
            numbers = outputs * -(-inputs * bits // (8 * _PACKED_BYTES)) * _PACKED_BYTES
        groups = -(-inputs // self._columns(inputs))
        if form is WeightForm.W8A8_FP8_BLOCKS:
            return numbers + 4 * groups * -(-outputs // BLOCK)
        integers = form in (WeightForm.W4A16, WeightForm.W8A16_INT8)
        scales = outputs * groups * (2 if integers else 4)
        per_word = 8 if form is WeightForm.W4A16 else 4
        zeros = outputs * -(-groups // per_word) * 4 if self.zero_points else 0
        return numbers + scales + zeros

    def _columns(self, inputs: int) -> int:
        return min(self.block[1] or inputs, inputs)
