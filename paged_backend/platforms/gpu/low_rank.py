"""The products of adapters on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from paged_kernels.low_rank import RANKS, expand, shrink
from torch import Tensor

from paged_backend.checkpoint.peft import LowRank
from paged_backend.models.linear import LinearSpec
from paged_backend.models.step_context import AdapterRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.values.errors import option_error


class TritonLowRank:
    """Weights in the dtype of hidden states; see `models.low_rank.LowRankProduct`.

    All slots have room for the largest rank, at addresses that stay, so that graphs remain valid
    when the adapter of a slot changes.

    Args:
        spec: the layer.
        num_slots: the number of adapters.
        max_rank: the largest rank of an adapter.
        dtype: dtype of the rows.
        transfer: the way to the device.

    Raises:
        ConfigError: the kernels have no such rank.
    """

    def __init__(
        self,
        spec: LinearSpec,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        transfer: Transfer,
    ) -> None:
        if max_rank > RANKS[-1]:
            raise option_error("max_lora_rank", f"can be at most {RANKS[-1]} on a GPU")
        rank, device = next(size for size in RANKS if size >= max_rank), transfer.device
        self._sizes = list(spec.parts.values())
        self._spans = [slice(*span) for span in pairwise(accumulate(self._sizes, initial=0))]
        self._transfer = transfer
        shape = num_slots, len(self._sizes), rank, spec.inputs
        self._a = torch.zeros(shape, dtype=dtype, device=device)
        self._b = torch.zeros(num_slots, spec.outputs, rank, dtype=dtype, device=device)
        self._ranks = torch.zeros(shape[:2], dtype=torch.int32, device=device)

    def prepared(self, parts: Sequence[LowRank | None]) -> Sequence[LowRank | None]:
        """Return `a` as [rank, inputs] and `b` as [outputs, max_rank], ready to be sent."""
        return [None if part is None else self._in_lines(part) for part in parts]

    def set(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Replace the weights of a slot; see `LowRankProduct.set`.

        The copies come after the steps that were launched before.
        """
        for index, (span, part) in enumerate(zip(self._spans, parts, strict=True)):
            if part is not None:
                self._a[slot, index, : len(part.a)].copy_(part.a, non_blocking=True)
                self._b[slot, span].copy_(part.b, non_blocking=True)
        ranks = [0 if part is None else len(part.a) for part in parts]
        self._ranks[slot].copy_(self._transfer.send(np.array(ranks, np.int32)))

    def add_to(self, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add the product of each row; see `LowRankProduct.add_to`."""
        slots = rows.slots
        sums = shrink(x.contiguous(), self._a, self._ranks, slots)
        expand(out, sums, self._b, self._ranks, slots, self._sizes)

    def _in_lines(self, part: LowRank) -> LowRank:
        rank, outputs = part.b.shape
        a = self._transfer.host_buffer(part.a.t().shape, self._a.dtype)
        b = self._transfer.host_buffer(torch.Size((outputs, self._b.shape[2])), self._b.dtype)
        a.copy_(part.a.t())
        b[:, :rank].copy_(part.b.t())
        return LowRank(a, b)
