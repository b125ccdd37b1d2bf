"""The base of linear layers whose kernels store or add their product in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, partial
from typing import Any

import numba
import torch
from torch import Tensor

from paged_backend.platforms.cpu.threads import ParallelKernel, claim, floats


class InPlaceProduct(ABC):
    """Implements the calls of a `LinearProduct` by one that is stored or added in place."""

    _num_outputs: int
    _bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] float32 for `x` [rows, inputs] float32."""
        out = torch.empty(x.shape[0], self._num_outputs)
        if self._bias is not None:
            _repeat()(self._bias.data_ptr(), out.data_ptr(), *out.shape)
        self._run(x.contiguous(), out, int(self._bias is not None))
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        if self._bias is None and out.is_contiguous():
            self._run(x.contiguous(), out, 1)
        else:
            out += self(x)

    @abstractmethod
    def _run(self, x: Tensor, out: Tensor, add: int) -> None:
        """Store the product of contiguous `x` and the weight in `out`, or add it if `add` is 1."""


def _repeat_row(arguments: Any) -> None:
    """Copy a row to all rows of the output."""
    _, row_address, out_address, rows, size = numba.carray(arguments, 5)
    source, out = floats(row_address, size), floats(out_address, (rows, size))
    row = claim(arguments)
    while row < rows:
        for i in range(size):
            out[row, i] = source[i]
        row = claim(arguments)


_repeat = cache(partial(ParallelKernel, _repeat_row))
