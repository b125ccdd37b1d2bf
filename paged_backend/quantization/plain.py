"""Weights that are stored one number per element, with separate scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import FLOATS, StoredType
from paged_backend.quantization.formats import blocks_of
from paged_backend.quantization.forms import Encoding
from paged_backend.quantization.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """int8 or float8 values of a weight, and a scale for each block of them.

    Attributes:
        dtype: dtype of the values, torch.int8 or torch.float8_e4m3fn.
        block: (rows, columns) that share a scale; 0 stands for all.
        scale: the suffix of the scales' tensor.
        symmetric: whether all zero points are 0, and none are stored.
        rounds_inputs: see :class:`~paged_backend.quantization.forms.Encoding`.
        parts: rows of the layers that a tool has fused into this one, each with one scale; then
            `block` is a single row's: a row has the scale of its part. Empty for none.
    """

    dtype: torch.dtype
    block: tuple[int, int]
    scale: str = "weight_scale"
    symmetric: bool = True
    rounds_inputs: bool = False
    parts: tuple[int, ...] = ()

    @property
    def encoding(self) -> Encoding:
        """See `WeightFormat.encoding`."""
        return Encoding(
            self.dtype,
            self.block,
            zero_points=not self.symmetric,
            rounds_inputs=self.rounds_inputs,
        )

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredType]:
        """See `WeightFormat.tensors`."""
        blocks = blocks_of(self._block(outputs, inputs), outputs, inputs)
        if self.parts:
            blocks = len(self.parts), 1
        inputs_scales = (len(self.parts) or 1,)
        tensors = {
            "weight": StoredType((outputs, inputs), (self.dtype,)),
            self.scale: StoredType(blocks),
            # Static scales of activations are not needed: each token, which may be larger than
            # what they were made from, has a scale from its own numbers.
            "input_scale": StoredType(inputs_scales, optional=True, one_for_all=True),
            "input_zero_point": StoredType((1,), (torch.int8, torch.int32, *FLOATS), optional=True),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = StoredType(blocks, (self.dtype,))
        return tensors

    def read(self, stored: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        """See `WeightFormat.read`."""
        return QuantizedWeight(
            stored["weight"],
            self._by_rows(stored[self.scale]),
            self._block(outputs, inputs),
            self._by_rows(stored["weight_zero_point"]) if not self.symmetric else None,
        )

    def _by_rows(self, blocks: Tensor) -> Tensor:
        """Repeat the number of each part for all of its rows."""
        if not self.parts:
            return blocks
        return blocks.repeat_interleave(torch.tensor(self.parts, device=blocks.device), 0)

    def _block(self, outputs: int, inputs: int) -> tuple[int, int]:
        return self.block[0] or outputs, self.block[1] or inputs
