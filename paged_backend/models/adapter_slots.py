"""The adapters that the layers of a model hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paged_backend.checkpoint.packed_adapter import is_packed, read_packed
from paged_backend.checkpoint.peft import Adapter, LowRank, ModuleSizes, read_adapter
from paged_backend.checkpoint.shares import Share
from paged_backend.checkpoint.stages import Stage, layer_of
from paged_backend.models.linear import LinearSpec
from paged_backend.models.low_rank import LowRankProduct
from paged_backend.models.step_context import StepContext


class AdapterSlots:
    """Reads adapters from their folders, and puts them into the slots of a model's layers.

    See :class:`~paged_backend.executor.base.AdapterStore`.

    Args:
        context: knows the slot of each adapter.
        num_slots: the number of adapters that the layers hold at once.
        max_rank: the largest rank of an adapter.

    Attributes:
        stage: the part of the model that has the layers; None if that is all of it.
    """

    def __init__(self, context: StepContext, num_slots: int, max_rank: int) -> None:
        self.context = context
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.stage: Stage | None = None
        self._layers: list[tuple[LinearSpec, LowRankProduct]] = []
        self._free = list(reversed(range(num_slots)))

    def add_layer(self, spec: LinearSpec, product: LowRankProduct) -> None:
        """Add a layer that adapters can change."""
        self._layers.append((spec, product))

    @property
    def sizes(self) -> Mapping[str, ModuleSizes]:
        """The inputs and outputs of each module that adapters can change, over all ranks."""
        sizes: dict[str, ModuleSizes] = {}
        for spec, _ in self._layers:
            for part, outputs in spec.parts.items():
                share = _share_of(spec, part)
                whole = (outputs, spec.inputs) if share is None else share.whole
                sizes[spec.full_name(part)] = ModuleSizes(whole[1], whole[0])
        return sizes

    def read(self, folder: Path) -> Adapter:
        """Read and check an adapter on any thread, so that `put` has little to do."""
        read = read_packed if is_packed(folder) else read_adapter
        adapter = read(folder, self.sizes, self.max_rank, self._is_elsewhere)
        prepared: dict[str, LowRank] = {}
        for spec, product in self._layers:
            parts = product.prepared([_ordered(adapter, spec, part) for part in spec.parts])
            for part, weights in zip(spec.parts, parts, strict=True):
                if weights is not None:
                    prepared[spec.full_name(part)] = weights
        return replace(adapter, modules=prepared)

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether another stage has the module of a name."""
        layer = layer_of(f"{name}.")
        if self.stage is None or layer is None or layer in self.stage.layers:
            return False
        return layer < self.stage.num_layers

    def put(self, adapter: object) -> None:
        """Put an adapter that was read into a free slot, between two steps."""
        assert isinstance(adapter, Adapter)
        slot = self._free.pop()
        for spec, product in self._layers:
            names = map(spec.full_name, spec.parts)
            product.set(slot, [adapter.modules.get(name) for name in names])
        self.context.slots_by_adapter[adapter.digest] = slot

    def drop(self, digest: str) -> None:
        """Free the slot of an adapter that no sequence has, between two steps."""
        slot = self.context.slots_by_adapter.pop(digest)
        for spec, product in self._layers:
            product.set(slot, [None] * len(spec.parts))
        self._free.append(slot)


def _share_of(spec: LinearSpec, part: str) -> Share | None:
    """Return what this rank has of the weight of a part; None if that is all of it."""
    return None if spec.division is None else spec.division.share_of(spec.full_name(part))


def _ordered(adapter: Adapter, spec: LinearSpec, part: str) -> LowRank | None:
    """Return this rank's weights of a part with its outputs in the order of the layer."""
    weights, order = adapter.modules.get(spec.full_name(part)), spec.row_order.get(part)
    share = _share_of(spec, part)
    if weights is None:
        return None
    if share is not None and share.dim == 1:
        weights = weights._replace(a=share.take(weights.a.t()).t().contiguous())
    elif share is not None:
        weights = weights._replace(b=share.take(weights.b.t()).t().contiguous())
    if order is None:
        return weights
    return weights._replace(b=weights.b[:, order.to(weights.b.device)].contiguous())
