"""Linear layers in plain torch, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.linear import LinearSpec


class TorchLinear:
    """A dense weight [outputs, inputs]; see :class:`~paged_backend.models.linear.LinearMethod`."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._weight = torch.empty(spec.outputs, spec.inputs, dtype=dtype, device=device)
        self._bias = torch.empty(spec.outputs, dtype=dtype, device=device) if spec.bias else None

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        parameters: dict[str, Parameter] = {}
        for kind, fused in (("weight", self._weight), ("bias", self._bias)):
            if fused is not None:
                parts = torch.split(fused, list(self._spec.parts.values()))
                for name, part in zip(self._spec.parts, parts, strict=True):
                    parameters[f"{name}.{kind}"] = part
        return parameters

    def pack(self) -> None:
        """Bring the weight's rows into the layer's order; torch reads them as they are."""
        self._spec.reorder(self.parameters())

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        return F.linear(x, self._weight, self._bias)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        return F.embedding(index, self._weight)


class RowwiseLinear(TorchLinear):
    """A float32 weight that is multiplied by one row at a time, with float32 results.

    torch rounds the result of a row in another way if there are other rows.
    """

    def __init__(self, spec: LinearSpec, device: torch.device) -> None:
        super().__init__(spec, torch.float32, device)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] float32 for `x` [rows, inputs]."""
        out = torch.empty(len(x), self._spec.outputs, device=x.device)
        for row, result in zip(x.float(), out, strict=True):
            # A copy, because the bits of a product depend on the alignment of the row, too.
            result.copy_(F.linear(row.clone(), self._weight, self._bias))
        return out
