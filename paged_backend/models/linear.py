"""Matrix products with a model's weights, in the form that suits the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from paged_backend.models.cpu_linear import PackedWeight


class Linear:
    """x @ weight.T + bias; made unfilled: fill `weight` and `bias` in place, then call `pack`."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Bring a float32 weight on the CPU into the form its kernel reads; `weight` is gone then.

        Elsewhere the weight stays as it is.
        """
        if self.weight.device.type != "cpu" or self.weight.dtype != torch.float32:
            return
        # Imported here because numba exists only where the CPU serves.
        from paged_backend.models.cpu_linear import PackedWeight

        self._packed = PackedWeight(self.weight)
        del self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """The product [rows, outputs] for `x` [rows, inputs]."""
        if self._packed is not None:
            return self._packed.multiply(x, self.bias)
        return F.linear(x, self.weight, self.bias)

    def add_to(self, hidden: Tensor, x: Tensor) -> None:
        """Add the product for `x` [rows, inputs] to `hidden` [rows, outputs] in place."""
        if self._packed is not None and self.bias is None and hidden.is_contiguous():
            self._packed.add_to(hidden, x)
        else:
            hidden += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """The weight's rows at `index` [count] int64, as an embedding tied to it looks them up."""
        if self._packed is not None:
            return self._packed.rows(index)
        return F.embedding(index, self.weight)
