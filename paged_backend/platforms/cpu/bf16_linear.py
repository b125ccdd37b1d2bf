"""Linear layers in bf16 on the CPU, with float32 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import LinearProduct, LinearSpec
from paged_backend.models.lora_kernels import without_adapters
from paged_backend.platforms.cpu import amx_products, bf16_kernels
from paged_backend.platforms.cpu.amx import DEPTH, ROWS
from paged_backend.platforms.cpu.bf16_kernels import gather_rows, round_rows
from paged_backend.platforms.cpu.gated import GatedLinear
from paged_backend.platforms.cpu.in_place import Initial, InPlaceProduct
from paged_backend.platforms.cpu.memory import WEIGHTS
from paged_backend.platforms.cpu.panels import make_panels
from paged_backend.platforms.portable.linear import TorchLinear

GATED_OUTPUTS = 2 * DEPTH
"""The number of outputs of `BFloat16GatedLinear` is a multiple of this."""


def padded_rows(rows: int, size: int) -> Tensor:
    """Return [rows, size] bf16 without values, followed by memory up to whole tiles of AMX."""
    return torch.empty(-(-rows // ROWS) * ROWS, size, dtype=torch.bfloat16)[:rows]


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
        weight = self._stored(self._weight)
        panels = make_panels(weight, self._steps * DEPTH, values_per_word=2)
        self._panels = WEIGHTS.keep(panels)
        if self._bias is not None:
            self._bias = self._stored(self._bias).float()
        del self._weight

    def _stored(self, values: Tensor) -> Tensor:
        """Return a row for each output, or the bias, in the order of the panels."""
        return values

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        return gather_rows(self._panels, index, self._spec.inputs)

    def _readable(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def _run(self, x: Tensor, out: Tensor, initial: Initial) -> None:
        if not self._on_amx:
            depth = self._steps * DEPTH
            bf16_kernels.multiply_panels(x.float(), self._panels, out, depth, initial)
            return
        rounded = self._rounded(x)
        x_at, panels_at, out_at = (t.data_ptr() for t in (rounded, self._panels, out))
        sizes = len(x), self._spec.outputs, self._steps
        amx_products.multiply_panels(x_at, panels_at, out_at, *sizes, initial)

    @property
    def reads_bfloat16(self) -> bool:
        """True if the kernels read rows from `padded_rows` without converting them."""
        return self._on_amx and self._steps * DEPTH == self._spec.inputs

    def _rounded(self, x: Tensor) -> Tensor:
        """Return rows in bf16, padded to the depth; memory follows them up to whole tiles."""
        rows, depth = -(-len(x) // ROWS) * ROWS, self._steps * DEPTH
        if x.dtype == torch.bfloat16 and x.shape[1] == depth:
            end = x.storage_offset() + rows * depth
            if x.untyped_storage().nbytes() >= end * x.itemsize:
                return x  # they are `padded_rows`
        return round_rows(x.float(), rows, depth)


class BFloat16GatedLinear(GatedLinear, BFloat16Linear):
    """The same for a gated MLP, on AMX units.

    Args:
        spec: the sizes; `spec.outputs` must be a multiple of `GATED_OUTPUTS`.
    """

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__(spec, on_amx=True)

    def _gate(self, x: Tensor, activation: Activation, initial: Initial) -> Tensor:
        """Compute act(gate) * up in bf16 [rows, outputs / 2], which other layers read as it is."""
        rows, columns = len(x), self._spec.outputs // 2
        out = padded_rows(rows, columns)
        rounded = self._rounded(x.contiguous())
        places = rounded.data_ptr(), self._panels.data_ptr(), out.data_ptr()
        amx_products.multiply_gated(*places, rows, columns, self._steps, initial, activation)
        return out


def reads_bfloat16(reader: LinearProduct | None) -> bool:
    """Return True if a layer reads rows in bf16 from `padded_rows` as they are."""
    reader = without_adapters(reader)
    return isinstance(reader, BFloat16Linear) and reader.reads_bfloat16
