"""Dense linear layers on a GPU: torch's products, and ours for few rows where they are faster."""

from __future__ import annotations

import torch
from paged_kernels.dense_matmul import dense_matmul, dense_matmul_silu_and_mul, num_arrivals
from paged_kernels.dense_table import max_rows
from paged_kernels.errors import ALIGNMENT
from paged_kernels.silu_and_mul import silu_and_mul
from torch import Tensor

from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.portable.linear import TorchLinear


class DenseLinear(TorchLinear):
    """A dense weight [outputs, inputs]; see :class:`~paged_backend.models.linear.LinearMethod`.

    Args:
        spec: sizes of the layer.
        dtype: dtype of the weight and the rows.
        device: where they are.
        device_name: torch's name of the GPU; empty if it is none.
    """

    def __init__(
        self, spec: LinearSpec, dtype: torch.dtype, device: torch.device, device_name: str
    ) -> None:
        super().__init__(spec, dtype, device)
        self._max_rows = 0  # up to which our product is faster
        if dtype.itemsize == 2:
            sizes = spec.outputs, spec.inputs
            self._max_rows = max_rows(device_name, *sizes, gated=spec.gated)
        counters = num_arrivals(spec.outputs)
        self._arrivals = torch.zeros(counters, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        if self._spec.gated or not self._is_ours(x):
            return super().__call__(x)
        return dense_matmul(x, self._weight, self._bias, arrivals=self._arrivals)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Compute silu(gate) * up [rows, outputs / 2] for the halves of each row of `self(x)`."""
        if self._spec.gated and self._bias is None and self._is_ours(x):
            return dense_matmul_silu_and_mul(x, self._weight)
        return silu_and_mul(self(x))

    def _is_ours(self, x: Tensor) -> bool:
        """Return True if our kernel supports the layout of `x` and is faster than torch."""
        readable = x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
        return 0 < len(x) <= self._max_rows and readable
