"""Linear layers on the CPU, with weights in panels that are read once per batch, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu.gated import GatedLinear, index_of, make_gate
from paged_backend.platforms.cpu.in_place import Initial, InPlaceProduct
from paged_backend.platforms.cpu.memory import WEIGHTS
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    claim_rows,
    device_function,
    floats,
    inlined,
    longs,
)
from paged_backend.platforms.cpu.tiles import (
    LANES,
    Arithmetic,
    Float32,
    make_multiply,
    panels_at_once,
)
from paged_backend.platforms.cpu.vectors import store_float32
from paged_backend.platforms.portable.linear import TorchLinear

GATED_OUTPUTS = 2 * LANES
"""The number of outputs of `CpuGatedLinear` is a multiple of this."""


class CpuLinear(InPlaceProduct, TorchLinear):
    """A float32 weight in panels [outputs / 16, inputs, 16], padded with zeros.

    See :class:`~paged_backend.models.linear.LinearMethod`.
    """

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec, torch.float32, torch.device("cpu"))
        self._num_outputs = spec.outputs
        self._panels = torch.empty(0)

    def pack(self) -> None:
        """Make the panels, and free the plain weight."""
        super().pack()
        weight = self._stored(self._weight)
        if self._bias is not None:
            self._bias = self._stored(self._bias)
        num_panels = -(-self._num_outputs // LANES)
        self._panels = WEIGHTS.zeros((num_panels, self._spec.inputs, LANES), torch.float32)
        full = self._num_outputs // LANES
        whole = weight[: full * LANES].view(full, LANES, self._spec.inputs)
        self._panels[:full] = whole.transpose(1, 2)
        if full < num_panels:
            rest = weight[full * LANES :]
            self._panels[full, :, : len(rest)] = rest.t()
        del self._weight

    def _stored(self, values: Tensor) -> Tensor:
        """Return the rows of the weight, or the bias, in the order of the panels."""
        return values

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        index, out = index.contiguous(), torch.empty(len(index), self._spec.inputs)
        _gather(index.data_ptr(), self._panels.data_ptr(), out.data_ptr(), *out.shape)
        return out

    def _run(self, x: Tensor, out: Tensor, initial: Initial) -> None:
        places = x.data_ptr(), self._panels.data_ptr(), out.data_ptr()
        _linear(*places, *x.shape, self._num_outputs, *initial)


class CpuGatedLinear(GatedLinear, CpuLinear):
    """The same for a gated MLP; `spec.outputs` must be a multiple of `GATED_OUTPUTS`."""

    def _gate(self, x: Tensor, activation: Activation, initial: Initial) -> Tensor:
        x = self._readable(x)
        out = torch.empty(len(x), self._num_outputs // 2)
        places = x.data_ptr(), self._panels.data_ptr(), out.data_ptr()
        _gated(*places, *x.shape, out.shape[1], *initial, index_of(activation))
        return out


@device_function
def _in_place(panels: int, numbers: int, memory: Any) -> Any:
    """Return the address of panels that need no change."""
    return panels


def make_multiply_panels(
    arithmetic: Arithmetic, load: Callable[..., Any] = _in_place, word_bytes: int = 4
) -> Any:
    """Return the device function that multiplies rows by panels, and has float32 sums.

    Its arguments are those of the kernel, and the address of rows [rows, depth]. Those of the
    kernel are, from the second one on: the addresses of the rows, of the panels [columns / LANES,
    depth, LANES] and of the result [rows, columns] float32; the number of rows, the depth in words,
    the number of columns, and the address and the stride of what the sums begin with.

    Args:
        arithmetic: arithmetic of the products.
        load: a device function that returns the address of the words of some panels, for the
            address of the panels, the number of words, and memory for them.
        word_bytes: what a word of the panels takes.
    """
    multiply = make_multiply(arithmetic, streams=word_bytes == 4)

    @inlined
    def multiply_last(
        rows: int,
        columns: int,
        column: int,
        depth: int,
        x: int,
        weights: int,
        out: int,
        initial: int,
        stride: int,
    ) -> None:
        """Multiply by the last panel, which is wider than the remaining columns."""
        count = columns - column
        product = np.zeros((rows, LANES), np.float32)
        address = np.int64(product.ctypes.data)
        if initial != 0:
            for row in range(rows):
                before = floats(initial + (row * stride + column) * 4, count)
                for lane in range(count):
                    product[row, lane] = before[lane]
        multiply(
            *(rows, LANES, x, depth, weights, LANES, 0, address, LANES, depth),
            *(address, np.int64(LANES)),
        )
        result = floats(out, (rows, columns))
        for row in range(rows):
            for lane in range(count):
                result[row, column + lane] = product[row, lane]

    @inlined
    def multiply_panels(arguments: Any, x: int) -> None:
        """Compute the columns of the result that belong to some panels, then to the next ones."""
        _, _, panels, out, rows, depth, columns, initial, stride = numba.carray(arguments, 9)
        width = panels_at_once(rows) * LANES
        memory = np.empty(width * depth if word_bytes != 4 else 0, np.uint32)
        column = claim(arguments) * width
        while column < columns:
            next_column = claim(arguments) * width
            following = panels + next_column * depth * word_bytes if next_column < columns else 0
            whole = min(width, (columns - column) // LANES * LANES)
            padded = min(width, (columns - column + LANES - 1) // LANES * LANES)
            weights = load(panels + column * depth * word_bytes, padded * depth, memory)
            before = initial + column * 4 if initial != 0 else initial
            multiply(
                *(rows, whole, x, depth, weights, LANES, LANES * depth),
                *(out + column * 4, columns, depth, before, stride, following),
            )
            if whole < width and column + whole < columns:
                last = weights + whole * depth * 4
                multiply_last(rows, columns, column + whole, depth, x, last, out, initial, stride)
            column = next_column

    return multiply_panels


_float32_panels = make_multiply_panels(Float32())


def _multiply_panels(arguments: Any) -> None:
    _float32_panels(arguments, numba.carray(arguments, 2)[1])


_linear = ParallelKernel(_multiply_panels)


_multiply = make_multiply(Float32(), streams=True)
_gate = make_gate("float32", np.float32, store_float32)


def _multiply_gated(arguments: Any) -> None:
    """Compute the columns of the result that belong to pairs of panels, then to the next ones."""
    words = numba.carray(arguments, 10)
    x, panels, out, rows, depth, columns, initial, stride = words[1:9]
    width = max(2, panels_at_once(rows)) // 2 * LANES  # columns of the result
    memory = np.empty((max(rows, 1), 2 * width), np.float32)
    column = claim(arguments) * width
    while column < columns:
        next_column = claim(arguments) * width
        following = panels + next_column * 2 * depth * 4 if next_column < columns else 0
        count = min(width, columns - column)
        sums = np.int64(memory.ctypes.data)
        before = initial + column * 2 * 4 if initial != 0 else initial
        weights = panels + column * 2 * depth * 4
        _multiply(
            *(rows, 2 * count, x, depth, weights, LANES, LANES * depth),
            *(sums, 2 * width, depth, before, stride, following),
        )
        size = rows, count // LANES
        _gate(sums, 2 * width, out + column * 4, columns, size, words[9])
        column = next_column
    memory[0, 0] = (
        0  # numba frees an array after its own last use, even if its address is used later
    )


_gated = ParallelKernel(_multiply_gated)


def _gather_rows(arguments: Any) -> None:
    """Copy rows of a weight [outputs, inputs] from its panels."""
    _, index_at, panels, out_at, count, inputs = numba.carray(arguments, 6)
    index, out = longs(index_at, count), floats(out_at, (count, inputs))
    start, end = claim_rows(arguments, count)
    while start < end:
        for row in range(start, end):
            first = panels + index[row] // LANES * inputs * LANES * 4
            panel, lane = floats(first, (inputs, LANES)), index[row] % LANES
            for i in range(inputs):
                out[row, i] = panel[i, lane]
        start, end = claim_rows(arguments, count)


_gather = ParallelKernel(_gather_rows)
