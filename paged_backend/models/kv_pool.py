"""The memory of a KV pool, divided among layers that may keep vectors of different sizes."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.values.kv_cache_groups import KVSizes

Shape = tuple[int, ...]


class PoolTensor:
    """The numbers of one kind, such as keys, that all layers keep in all blocks.

    If the layers are alike, each layer of a group has a part of the memory, which is contiguous.
    Otherwise the layers of a group follow each other in a block, so that a layer's tensor has gaps
    between its blocks. The memory then has room for the largest group in each block.

    Args:
        spec: the layers and their groups.
        num_blocks: the number of blocks.
        shape_of: the shape of a block's numbers in a layer that keeps something.
        make: allocates the memory, filled, for a shape.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: int,
        shape_of: Callable[[KVSizes], Shape],
        make: Callable[[Shape], Tensor],
    ) -> None:
        self._layers: dict[int, Tensor] = {}
        if spec.is_uniform:
            shape = shape_of(next(iter(spec.sizes.values())))
            self.memory = make((spec.group_size, num_blocks, *shape))
            for layer, place in spec.places.items():
                self._layers[layer] = self.memory[place.part]
            return
        block_numbers = spec.largest(lambda sizes: math.prod(shape_of(sizes)))
        self.memory = make((1, num_blocks, block_numbers))
        for group in spec.groups:
            start = 0
            for layer in group.layers:
                shape = shape_of(spec.sizes[layer])
                end = start + math.prod(shape)
                self._layers[layer] = self.memory[0, :, start:end].view(num_blocks, *shape)
                start = end

    def of(self, layer: int) -> Tensor:
        """Return the numbers of a layer, [num_blocks, ...]; only blocks may have gaps."""
        return self._layers[layer]

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block over another one, in all layers."""
        self.memory[:, target] = self.memory[:, source]
