"""Products of low rank that adapters add to linear layers: what a platform implements of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paged_backend.checkpoint.peft import LowRank
from paged_backend.models.linear import LinearSpec
from paged_backend.models.step_context import AdapterRows


class LowRankProduct(Protocol):
    """The low-rank weights of one linear layer, one for each slot of an adapter."""

    def prepared(self, parts: Sequence[LowRank | None]) -> Sequence[LowRank | None]:
        """Bring an adapter's weights into the form that `set` takes, on any thread.

        Args:
            parts: the weights of each part of the layer; None for a part without any.
        """
        ...

    def set(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Replace the weights of a slot, between two steps.

        Args:
            slot: its number.
            parts: the result of `prepared`, or None for each part.
        """
        ...

    def add_to(self, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Add row @ a @ b of each row's adapter to `out` [rows, outputs] in place.

        The result of a row does not depend on the other rows.

        Args:
            out: [rows, outputs] in the dtype of hidden states, or in float32 for sums that are not
                rounded yet, contiguous. For a layer with a spec that is gated, the outputs have
                the order of `GatedMethod.initial_sums`.
            x: [rows, inputs] in the dtype of hidden states.
            rows: the adapters of the rows. They may change between the replays of a graph.
        """
        ...


LowRankFactory = Callable[[LinearSpec, int, int], LowRankProduct]
"""Makes the product for a layer with a number of slots, which are empty, and a largest rank."""
