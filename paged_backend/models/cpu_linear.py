"""Linear layers on the CPU: weights in panels that are read in order, once for a batch."""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.models.cpu_tiles import (
    LANES,
    device_function,
    kernel,
    multiply,
    use_torch_threads,
)

Floats = NDArray[np.float32]

_INPUT_BYTES = 1 << 18  # of the inputs that stay in the cache while panels pass by


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
        self._panels_array = self._panels.numpy()

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
        workers = use_torch_threads()
        _linear(x.contiguous().numpy(), self._panels_array, out.numpy(), add, workers)


@kernel
def _linear(x: Floats, panels: Floats, out: Floats, add: int, workers: int) -> None:
    for worker in numba.prange(workers):
        first = np.int64(worker) * len(panels) // workers
        last = np.int64(worker + 1) * len(panels) // workers
        _multiply_panels(first, last, x, panels, out, add)


@device_function
def _multiply_panels(
    first: int, last: int, x: Floats, panels: Floats, out: Floats, add: int
) -> None:
    """Compute the columns of `out` that some panels yield, a band of rows at a time."""
    depth, columns = x.shape[1], out.shape[1]
    band = max(1, _INPUT_BYTES // (depth * 4))
    for row in range(0, len(x), band):
        rows = min(band, len(x) - row)
        for panel in range(first, last):
            column = panel * LANES
            a = np.int64(x.ctypes.data) + row * depth * 4
            b = np.int64(panels.ctypes.data) + column * depth * 4
            if column + LANES <= columns:
                c = np.int64(out.ctypes.data) + (row * columns + column) * 4
                multiply(rows, LANES, a, depth, b, LANES, c, columns, depth, add)
            else:
                _multiply_last(rows, a, b, depth, row, column, out, add)


@device_function
def _multiply_last(
    rows: int, a: int, b: int, depth: int, row: int, column: int, out: Floats, add: int
) -> None:
    """A panel that is wider than what is left of `out`."""
    product = np.empty((rows, LANES), np.float32)
    c = np.int64(product.ctypes.data)
    multiply(rows, LANES, a, depth, b, LANES, c, LANES, depth, np.int64(0))
    for i in range(rows):
        for j in range(out.shape[1] - column):
            out[row + i, column + j] = product[i, j] + add * out[row + i, column + j]
