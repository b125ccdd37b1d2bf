"""The base of linear layers with kernels that store or add their product in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.platforms.cpu.rows import contiguous


class Initial(NamedTuple):
    """What the sums of a product begin with: a float32 matrix, or one row for all rows."""

    address: int  # 0 for zeros
    stride: int  # floats from a row to the next one; 0 for one row


ZEROS = Initial(0, 0)


class InPlaceProduct(ABC):
    """Implements the calls of a `LinearProduct` by one that is stored or added in place."""

    _num_outputs: int
    _bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] float32 for `x` [rows, inputs]."""
        out = torch.empty(x.shape[0], self._num_outputs)
        self._run(self._readable(x), out, self._bias_of_rows())
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        if self._bias is None and out.is_contiguous():
            self._run(self._readable(x), out, Initial(out.data_ptr(), out.shape[1]))
        else:
            out += self(x)

    def _bias_of_rows(self) -> Initial:
        return ZEROS if self._bias is None else Initial(self._bias.data_ptr(), 0)

    def _readable(self, x: Tensor) -> Tensor:
        """Return rows that the kernels can read."""
        return contiguous(x.float())

    @abstractmethod
    def _run(self, x: Tensor, out: Tensor, initial: Initial) -> None:
        """Store the product of readable `x` and the weight, plus `initial`, in `out`."""
