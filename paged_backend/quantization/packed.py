"""Weights with values that are packed into 32-bit words: compressed-tensors, GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import StoredType
from paged_backend.quantization.bits import num_words, unpack
from paged_backend.quantization.formats import FormatError
from paged_backend.quantization.forms import Encoding
from paged_backend.quantization.weight import QuantizedWeight

_INT32 = (torch.int32,)
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that holds each of eight neighbors


@dataclass(frozen=True, slots=True)
class PackQuantizedFormat:
    """The format "pack-quantized" of compressed-tensors: words run along the inputs.

    Attributes:
        bits: bits of a value, 2 to 8.
        group_size: inputs that share a scale; 0 stands for all.
        symmetric: whether all zero points are 0, and none are stored.
        act_order: whether the group of each input is stored.
    """

    bits: int
    group_size: int
    symmetric: bool = True
    act_order: bool = False

    @property
    def encoding(self) -> Encoding:
        """See `WeightFormat.encoding`."""
        return _encoding(self.bits, self.group_size, zero_points=not self.symmetric)

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """See `WeightFormat.tensors`."""
        groups = _num_groups(inputs, self.group_size)
        tensors = {
            "weight_packed": StoredType((outputs, num_words(inputs, self.bits)), _INT32),
            "weight_scale": StoredType((outputs, groups)),
            "weight_shape": StoredType((2,), (torch.int64, torch.int32)),
        }
        if not self.symmetric:
            shape = num_words(outputs, self.bits), groups
            tensors["weight_zero_point"] = StoredType(shape, _INT32)
        if self.act_order:
            tensors["weight_g_idx"] = StoredType((inputs,), _INT32)
        return tensors

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `WeightFormat.read`."""
        if stored["weight_shape"].tolist() != [outputs, inputs]:
            raise FormatError(f"weight_shape must hold [{outputs}, {inputs}]")
        zeros = None
        if not self.symmetric:
            zeros = unpack(stored["weight_zero_point"].t(), self.bits, outputs).t()
        return QuantizedWeight(
            _signed(unpack(stored["weight_packed"], self.bits, inputs), self.bits),
            stored["weight_scale"],
            (1, self.group_size or inputs),
            _zero_points(zeros, self.bits),
            _group_index(stored, "weight_g_idx", self.group_size, inputs),
        )


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """The format of GPTQ: the weight is transposed, and words run along the inputs.

    Attributes:
        bits: bits of a value: 2, 3, 4 or 8.
        group_size: inputs that share a scale; 0 stands for all.
        zero_offset: what is added to stored zero points: 1 in version 1, 0 in version 2.
    """

    bits: int
    group_size: int
    zero_offset: int

    @property
    def encoding(self) -> Encoding:
        """See `WeightFormat.encoding`."""
        return _encoding(self.bits, self.group_size, zero_points=True)

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """See `WeightFormat.tensors`."""
        groups = _num_groups(inputs, self.group_size)
        return {
            "qweight": StoredType((num_words(inputs, self.bits), outputs), _INT32),
            "qzeros": StoredType((groups, num_words(outputs, self.bits)), _INT32),
            "scales": StoredType((groups, outputs)),
            "g_idx": StoredType((inputs,), _INT32, optional=True),
        }

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `WeightFormat.read`."""
        zeros = unpack(stored["qzeros"], self.bits, outputs).t() + self.zero_offset
        return QuantizedWeight(
            _signed(unpack(stored["qweight"].t(), self.bits, inputs), self.bits),
            stored["scales"].t(),
            (1, self.group_size or inputs),
            # Version 1 stores the zero point 0 as -1.
            _zero_points(zeros & (2**self.bits - 1), self.bits),
            _group_index(stored, "g_idx", self.group_size, inputs),
        )


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """The format "gemm" of AWQ: the weight is transposed, and words of 8 run along the outputs.

    Attributes:
        group_size: inputs that share a scale; 0 stands for all.
    """

    group_size: int

    @property
    def encoding(self) -> Encoding:
        """See `WeightFormat.encoding`."""
        return _encoding(_AWQ_BITS, self.group_size, zero_points=True)

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """See `WeightFormat.tensors`."""
        groups, words = _num_groups(inputs, self.group_size), num_words(outputs, _AWQ_BITS)
        return {
            "qweight": StoredType((inputs, words), _INT32),
            "qzeros": StoredType((groups, words), _INT32),
            "scales": StoredType((groups, outputs)),
        }

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `WeightFormat.read`."""
        return QuantizedWeight(
            _signed(_unpack_awq(stored["qweight"])[:, :outputs].t(), _AWQ_BITS),
            stored["scales"].t(),
            (1, self.group_size or inputs),
            _zero_points(_unpack_awq(stored["qzeros"])[:, :outputs].t(), _AWQ_BITS),
        )


def _unpack_awq(words: Tensor) -> Tensor:
    per_word = 32 // _AWQ_BITS
    numbers = unpack(words, _AWQ_BITS, words.shape[1] * per_word)
    return numbers.view(len(words), -1, per_word)[:, :, _AWQ_ORDER].flatten(1)


def _encoding(bits: int, group_size: int, *, zero_points: bool) -> Encoding:
    return Encoding(torch.int8, (1, group_size), bits, zero_points)


def _signed(numbers: Tensor, bits: int) -> Tensor:
    """Shift numbers from 0 on to both signs, as int8."""
    return (numbers - (1 << (bits - 1))).to(torch.int8)


def _zero_points(numbers: Tensor | None, bits: int) -> Tensor | None:
    """Shift zero points like the numbers; None if all are then zero, as in symmetric weights."""
    if numbers is None:
        return None
    zeros = _signed(numbers, bits)
    return zeros if bool(zeros.any()) else None


def _num_groups(inputs: int, group_size: int) -> int:
    return -(-inputs // (group_size or inputs))


def _group_index(
    stored: Mapping[str, Tensor], name: str, group_size: int, inputs: int
) -> Tensor | None:
    """The stored group of each input, or None if it is the usual one.

    Raises:
        FormatError: a group does not exist.
    """
    if name not in stored:
        return None
    index = stored[name].long()
    groups = _num_groups(inputs, group_size)
    if not bool(((index >= 0) & (index < groups)).all()):
        raise FormatError(f"{name} must hold groups from 0 to {groups - 1}")
    usual = torch.arange(inputs) // (group_size or inputs)
    return None if torch.equal(index, usual) else index
