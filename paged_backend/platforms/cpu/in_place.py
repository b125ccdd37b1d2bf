"""The base of linear layers whose kernels store or add their product in place."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class InPlaceProduct(ABC):
    """Implements the calls of a `LinearProduct` by one that is stored or added in place."""

    _num_outputs: int
    _bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] float32 for `x` [rows, inputs] float32."""
        out = torch.empty(x.shape[0], self._num_outputs)
        if self._bias is not None:
            out.copy_(self._bias.expand_as(out))
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
