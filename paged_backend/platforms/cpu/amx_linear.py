"""Linear layers in bf16 on the CPU's AMX units."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu.amx import DEPTH, LANES, ROWS, multiply_panels
from paged_backend.platforms.torch.linear import TorchLinear


class AmxLinear(TorchLinear):
    """A bf16 weight in panels [outputs / 16, inputs / 32, 16, 16, 2], padded with zeros.

    Inputs are rounded to bf16; sums and outputs are float32. See
    :class:`~paged_backend.models.linear.LinearMethod`.
    """

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec, torch.bfloat16, torch.device("cpu"))
        self._num_panels = -(-spec.outputs // LANES)
        self._steps = -(-spec.inputs // DEPTH)
        self._panels = torch.empty(0)

    def pack(self) -> None:
        """Make the panels, and free the plain weight."""
        shape = self._num_panels * LANES, self._steps * DEPTH
        padded = torch.zeros(shape, dtype=torch.bfloat16)
        padded[: self._spec.outputs, : self._spec.inputs] = self._weight
        tiles = padded.view(self._num_panels, LANES, self._steps, DEPTH // 2, 2)
        self._panels = tiles.permute(0, 2, 3, 1, 4).contiguous()
        if self._bias is not None:
            self._bias = self._bias.float()
        del self._weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] float32 for `x` [rows, inputs] float32."""
        rows, inputs = x.shape
        row_tiles = -(-rows // ROWS)
        padded = torch.zeros(row_tiles * ROWS, self._steps * DEPTH, dtype=torch.bfloat16)
        padded[:rows, :inputs] = x
        out = torch.empty(row_tiles * ROWS, self._num_panels * LANES)
        multiply_panels(
            padded.data_ptr(),
            self._panels.data_ptr(),
            out.data_ptr(),
            row_tiles,
            self._num_panels,
            self._steps,
        )
        result = out[:rows, : self._spec.outputs].contiguous()
        return result if self._bias is None else result.add_(self._bias)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        rows = self._panels[index // LANES, :, :, index % LANES]
        return rows.reshape(len(index), -1)[:, : self._spec.inputs].float()
