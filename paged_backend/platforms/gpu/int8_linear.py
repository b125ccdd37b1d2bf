"""Linear layers with int8 weights, as Triton kernels."""

from __future__ import annotations

from paged_kernels.quantize_rows import quantize_rows
from paged_kernels.scaled_matmul import scaled_matmul
from torch import Tensor

from paged_backend.platforms.torch.int8_linear import TorchInt8Linear


class TritonInt8Linear(TorchInt8Linear):
    """See `Kernels.int8_linear`; rows are rounded, and sums are exact."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        values, scales = quantize_rows(x.contiguous())
        return scaled_matmul(
            values, scales, self._weight, self._scales, self._bias, out_dtype=x.dtype
        )
