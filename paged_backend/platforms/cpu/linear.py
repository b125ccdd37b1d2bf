"""Linear layers on the CPU: weights in panels that are read in order, once for a batch."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.cpu_threads import ParallelKernel, claim, device_function, floats
from paged_backend.models.cpu_tiles import LANES, multiply


class PackedWeight:
    """A float32 weight [outputs, inputs] as panels [outputs / 16, inputs, 16], zeros at the end."""

    def __init__(self, weight: Tensor) -> None:
        self._outputs, inputs = weight.shape
        num_panels = -(-self._outputs // LANES)
        self._panels = torch.zeros(num_panels, inputs, LANES)
        full = self._outputs // LANES
        whole = weight[: full * LANES].view(full, LANES, inputs)
        self._panels[:full] = whole.transpose(1, 2)
        if full < num_panels:
            rest = weight[full * LANES :]
            self._panels[full, :, : len(rest)] = rest.t()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias, [rows, outputs], for `x` [rows, inputs]."""
        out = torch.empty(len(x), self._outputs)
        if bias is not None:
            out.copy_(bias.expand_as(out))
        self._run(x, out, int(bias is not None))
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add x @ weight.T to `out`, which is contiguous."""
        self._run(x, out, 1)

    def rows(self, index: Tensor) -> Tensor:
        """The weight's rows at `index` [count]: the lookup of an embedding tied to an output."""
        return self._panels[index // LANES, :, index % LANES]

    def _run(self, x: Tensor, out: Tensor, add: int) -> None:
        x = x.contiguous()
        _linear(x.data_ptr(), self._panels.data_ptr(), out.data_ptr(), *x.shape, self._outputs, add)


@device_function
def _multiply_last(
    rows: int, columns: int, column: int, depth: int, x: int, weights: int, out: int, add: int
) -> None:
    """Multiply by a panel that is wider than the columns that are left."""
    product = np.empty((rows, LANES), np.float32)
    address = np.int64(product.ctypes.data)
    multiply(rows, LANES, x, depth, weights, LANES, address, LANES, depth, np.int64(0))
    result = floats(out, (rows, columns))
    for row in range(rows):
        for lane in range(columns - column):
            before = result[row, column + lane] if add else np.float32(0.0)
            result[row, column + lane] = before + product[row, lane]


def _multiply_panels(arguments: Any) -> None:
    """Compute the columns of the result that a panel yields, one panel after the other."""
    _, x, panels, out, rows, depth, columns, add = numba.carray(arguments, 8)
    panel = claim(arguments)
    while panel * LANES < columns:
        column = panel * LANES
        weights = panels + column * depth * 4
        if column + LANES <= columns:
            multiply(rows, LANES, x, depth, weights, LANES, out + column * 4, columns, depth, add)
        else:
            _multiply_last(rows, columns, column, depth, x, weights, out, add)
        panel = claim(arguments)


_linear = ParallelKernel(_multiply_panels)
