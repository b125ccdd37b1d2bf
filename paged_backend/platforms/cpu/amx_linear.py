"""Linear layers in bf16 on the CPU's AMX units."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu.amx import DEPTH, LANES, ROWS, multiply_panels, round_to_bf16
from paged_backend.platforms.cpu.in_place import InPlaceProduct
from paged_backend.platforms.torch.linear import TorchLinear


class AmxLinear(InPlaceProduct, TorchLinear):
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

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        rows = self._panels[index // LANES, :, :, index % LANES]
        return rows.reshape(len(index), -1)[:, : self._spec.inputs].float()

    def _run(self, x: Tensor, out: Tensor, add: int) -> None:
        rows, depth = len(x), self._steps * DEPTH
        padded = -(-rows // ROWS) * ROWS  # AMX reads whole tiles
        values = torch.empty(padded, depth, dtype=torch.bfloat16)
        round_to_bf16(x.data_ptr(), values.data_ptr(), rows, self._spec.inputs, depth)
        addresses = values.data_ptr(), self._panels.data_ptr(), out.data_ptr()
        multiply_panels(*addresses, rows, self._spec.outputs, self._steps, add)
