"""Linear layers in bf16 on the CPU, with float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu import amx, bf16_kernels
from paged_backend.platforms.cpu.amx import DEPTH, LANES, ROWS
from paged_backend.platforms.cpu.bf16_kernels import round_rows
from paged_backend.platforms.cpu.in_place import Initial, InPlaceProduct
from paged_backend.platforms.cpu.panels import make_panels
from paged_backend.platforms.torch.linear import TorchLinear


class BFloat16Linear(InPlaceProduct, TorchLinear):
    """A bf16 weight in panels [outputs / 16, inputs / 2, 16, 2], padded with zeros.

    Inputs are rounded to bf16; sums and outputs are float32. See
    :class:`~paged_backend.models.linear.LinearMethod`.

    Args:
        spec: the sizes.
        on_amx: compute on AMX units instead of with vector instructions.
    """

    def __init__(self, spec: LinearSpec, *, on_amx: bool) -> None:
        super().__init__(spec, torch.bfloat16, torch.device("cpu"))
        self._num_outputs = spec.outputs
        self._steps = -(-spec.inputs // DEPTH)
        self._panels = torch.empty(0)
        self._on_amx = on_amx

    def pack(self) -> None:
        """Make the panels, and free the plain weight."""
        super().pack()
        self._panels = make_panels(self._weight, self._steps * DEPTH, values_per_word=2)
        if self._bias is not None:
            self._bias = self._bias.float()
        del self._weight

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        rows = self._panels[index // LANES, :, index % LANES]
        return rows.flatten(1)[:, : self._spec.inputs].float()

    def _run(self, x: Tensor, out: Tensor, initial: Initial) -> None:
        rows, depth = len(x), self._steps * DEPTH
        if not self._on_amx:
            bf16_kernels.multiply_panels(x, self._panels, out, depth, initial)
            return
        values = round_rows(x, -(-rows // ROWS) * ROWS, depth)  # AMX reads whole tiles
        x_at, panels_at, out_at = (t.data_ptr() for t in (values, self._panels, out))
        sizes = rows, self._spec.outputs, self._steps
        amx.multiply_panels(x_at, panels_at, out_at, *sizes, initial)
