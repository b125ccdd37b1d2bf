"""Linear layers with int8 weights on the CPU; inputs are rounded to int8 row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.platforms.cpu.amx import ROWS, TILE_CONFIG
from paged_backend.platforms.cpu.in_place import ZEROS, Initial, InPlaceProduct
from paged_backend.platforms.cpu.int8_kernels import (
    DEPTH,
    MANY_ROWS,
    Instructions,
    supported_instructions,
)
from paged_backend.platforms.cpu.memory import WEIGHTS
from paged_backend.platforms.cpu.tiles import LANES
from paged_backend.platforms.portable.int8_linear import TorchInt8Linear
from paged_backend.quantization.weight import QuantizedWeight

_TILE_CONFIG: int = TILE_CONFIG.ctypes.data


class CpuInt8Linear(InPlaceProduct, TorchInt8Linear):
    """An int8 weight in panels of 16 outputs; each panel has a row of words per step of the depth.

    A word holds four values with VNNI and AMX, and half a word holds two with AVX2. See
    :class:`~paged_backend.models.linear.LinearProduct`.

    Attributes:
        instructions: the kernels.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        instructions: Instructions | None = None,
    ) -> None:
        super().__init__(weight, bias, torch.float32)
        del self._weight  # the panels hold its values
        self.instructions = instructions or supported_instructions()[0]
        self._num_outputs, self._inputs = weight.values.shape
        self._depth = -(-self._inputs // DEPTH) * DEPTH
        num_panels, values = -(-self._num_outputs // LANES), self.instructions.values
        padded = torch.zeros(num_panels * LANES, self._depth, dtype=torch.int8)
        padded[: self._num_outputs, : self._inputs] = weight.values
        steps = padded.view(num_panels, LANES, self._depth // values, values)
        self._panels = WEIGHTS.keep(steps.transpose(1, 2))
        self._corrections = padded.sum(1, dtype=torch.int32) * -self.instructions.offset
        constants = (self._panels, self._scales, self._corrections)
        self._addresses = tuple(tensor.data_ptr() for tensor in constants)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """The number of outputs, and the number of inputs in the panels."""
        return self._num_outputs, self._depth

    def addresses(self, zeros: Tensor) -> tuple[int, ...]:
        """Return the addresses of panels, scales, corrections and bias.

        Args:
            zeros: [outputs] float32, what stands for a bias that there is not.
        """
        bias = zeros if self._bias is None else self._bias
        return *self._addresses, bias.data_ptr()

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        values = self._panels[index // LANES, :, index % LANES].flatten(1)
        return values[:, : self._inputs] * self._scales[index].unsqueeze(1)

    def sums(self, x: Tensor) -> Tensor:
        """See `Int8Product.sums`."""
        out = torch.empty(x.shape[0], self._num_outputs, dtype=torch.int32)
        panels, _, corrections = self._addresses
        self._multiply(self._readable(x), out, (panels, 0, corrections), ZEROS)
        return out

    def _run(self, x: Tensor, out: Tensor, initial: Initial) -> None:
        self._multiply(x, out, self._addresses, initial)

    def _multiply(
        self, x: Tensor, out: Tensor, constants: tuple[int, ...], initial: Initial
    ) -> None:
        rows, inputs = x.shape
        kernels = self.instructions
        arguments = (*constants, out.data_ptr(), rows, self._depth, out.shape[1], *initial)
        if 0 < rows < MANY_ROWS:
            kernels.few_rows()(x.data_ptr(), 0, *arguments, _TILE_CONFIG, inputs)
            return
        padded = -(-rows // ROWS) * ROWS  # AMX reads whole tiles
        values = torch.empty(padded, self._depth, dtype=kernels.dtype)
        scales = torch.empty(rows)
        rounded = values.data_ptr(), scales.data_ptr()
        kernels.quantize()(x.data_ptr(), *rounded, rows, inputs, self._depth)
        kernels.many_rows()(*rounded, *arguments, _TILE_CONFIG)
