"""The products of adapters on the CPU, segment by segment: rows that have the same adapter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from paged_backend.checkpoint.peft import LowRank
from paged_backend.models.linear import LinearSpec
from paged_backend.models.step_context import AdapterRows
from paged_backend.platforms.cpu.low_rank_kernels import (
    BFLOAT16,
    ENTRY,
    FLOAT16,
    FLOAT32,
    RANKS,
    low_rank_kernel,
)
from paged_backend.platforms.cpu.tiles import LANES

_FORMS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
_SMALL = (torch.bfloat16, torch.float16)


class CpuLowRank:
    """Weights in 16 bits if these hold them exactly, otherwise in float32.

    See :class:`~paged_backend.models.low_rank.LowRankProduct`.

    The kernel finds the weights by their addresses in a table, so that graphs remain valid when
    the adapter of a slot changes.

    Args:
        spec: the layer. If it is gated, its outputs are panels of gate and up in turns.
        num_slots: the number of adapters.
    """

    def __init__(self, spec: LinearSpec, num_slots: int) -> None:
        sizes = list(spec.parts.values())
        starts = [*accumulate(sizes[:-1], initial=0)]
        step = LANES
        if spec.gated:
            starts, step = [part * LANES for part in range(len(sizes))], len(sizes) * LANES
        # For each part: its outputs, the first of them, and the distance from panel to panel.
        self._parts = torch.tensor([(*pair, step) for pair in zip(sizes, starts, strict=True)])
        # For each slot and part: the addresses of a and b, the rank and the form.
        self._table = torch.zeros(num_slots, len(sizes), ENTRY, dtype=torch.int64)
        self._weights: list[Sequence[LowRank | None]] = [[] for _ in range(num_slots)]
        low_rank_kernel()

    def prepared(self, parts: Sequence[LowRank | None]) -> Sequence[LowRank | None]:
        """Return panels with zeros: `a` in groups of ranks, and `b`.

        They are [rank / RANKS, inputs / 16, RANKS, 16] and [outputs / 16, rank, 16], in the
        smallest form that holds the weights exactly. Files of adapters often are in 16 bits.
        """
        return [None if part is None else _in_panels(part) for part in parts]

    def set(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Replace the weights of a slot; see `LowRankProduct.set`."""
        self._weights[slot] = parts
        for row, part in zip(self._table[slot], parts, strict=True):
            entry = [0] * ENTRY
            if part is not None:
                places = part.a.data_ptr(), part.b.data_ptr()
                entry = [*places, part.b.shape[1], _FORMS[part.a.dtype]]
            row.copy_(torch.tensor(entry))

    def add_to(self, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add the product of each row; see `LowRankProduct.add_to`."""
        if out.dtype != torch.float32:  # the sums are rounded once
            sums = out.float()
            self.add_to(sums, x, rows)
            out.copy_(sums)
            return
        x = x.float().contiguous()
        tables = rows.slots, rows.order, rows.segments, rows.num_segments, self._table, self._parts
        sizes = len(x), x.shape[1], out.shape[1], len(self._parts)
        low_rank_kernel()(*(tensor.data_ptr() for tensor in (x, out, *tables)), *sizes)


def _in_panels(part: LowRank) -> LowRank:
    (inputs, rank), outputs = part.a.shape, part.b.shape[1]
    missing = -rank % RANKS
    a = pad(part.a.t(), (0, -inputs % LANES, 0, missing))
    b = pad(part.b, (0, -outputs % LANES, 0, missing))
    groups = a.reshape(-1, RANKS, a.shape[1] // LANES, LANES).transpose(1, 2)
    panels = groups, b.reshape(len(b), -1, LANES).transpose(0, 1)
    fitting = (dtype for dtype in _SMALL if all(_holds(dtype, values) for values in panels))
    dtype = next(fitting, torch.float32)
    return LowRank(*(values.to(dtype).contiguous() for values in panels))


def _holds(dtype: torch.dtype, values: Tensor) -> bool:
    """Return True if a dtype has each of these float32 numbers."""
    return torch.equal(values.to(dtype).float(), values)
