"""Linear layers in float32 on AMX units: a number is a sum of two bf16 numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu import amx_products
from paged_backend.platforms.cpu.amx import DEPTH, LANES, ROWS
from paged_backend.platforms.cpu.bf16_kernels import split_rows
from paged_backend.platforms.cpu.in_place import Initial, InPlaceProduct
from paged_backend.platforms.cpu.memory import WEIGHTS
from paged_backend.platforms.cpu.panels import make_panels
from paged_backend.platforms.portable.linear import TorchLinear


class SplitLinear(InPlaceProduct, TorchLinear):
    """A float32 weight in two parts, panels [outputs / 16, 2, inputs / 2, 16, 2] of bf16.

    The parts take as much memory as the weight and keep 16 bits of its precision, and so do those
    of the inputs. Sums and outputs are float32. See
    :class:`~paged_backend.models.linear.LinearMethod`.
    """

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec, torch.float32, torch.device("cpu"))
        self._num_outputs = spec.outputs
        self._steps = -(-spec.inputs // DEPTH)
        self._panels = torch.empty(0)

    def pack(self) -> None:
        """Make the panels, and free the plain weight."""
        super().pack()
        large = self._weight.bfloat16()
        small = (self._weight - large.float()).bfloat16()
        depth = self._steps * DEPTH
        parts = [make_panels(part, depth, values_per_word=2) for part in (large, small)]
        self._panels = WEIGHTS.stack(parts, dim=1)
        del self._weight

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        parts = self._panels[index // LANES, :, :, index % LANES]
        return parts.float().sum(1).flatten(1)[:, : self._spec.inputs]

    def _run(self, x: Tensor, out: Tensor, initial: Initial) -> None:
        rows = -(-len(x) // ROWS) * ROWS
        split = split_rows(x, rows, self._steps * DEPTH)
        places = split.data_ptr(), self._panels.data_ptr(), out.data_ptr()
        sizes = len(x), self._num_outputs, self._steps
        amx_products.multiply_panels(*places, *sizes, initial, parts=2)
