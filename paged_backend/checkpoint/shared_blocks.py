"""Blocks of attention and an MLP that several layers of a model use; no tensors here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_backend.checkpoint.tensors import Role, TensorSpec, linear_tensors

BLOCK = "shared_transformer"
"""The checkpoint's name of a block, in the first layer that uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlocks:
    """Blocks that layers use in turns, each time with other adapters (Zamba 2).

    A block reads the hidden states beside the embeddings, and its output is added to what the
    layer's module with a state reads. Glorioso et al., "The Zamba2 Suite: Technical Report" (2024).

    Attributes:
        layers: the numbers of the layers that use a block.
        num_blocks: the number of blocks.
        rank: rank of the adapters, which add low-rank products to the first ones of the MLP.
        attention_adapters: whether queries, keys and values have adapters, too.
        bias: whether the linear layers of the MLP have biases.
    """

    layers: tuple[int, ...]
    num_blocks: int
    rank: int
    attention_adapters: bool
    bias: bool

    @property
    def owners(self) -> tuple[int, ...]:
        """The layers that have the blocks in the checkpoint."""
        return self.layers[: self.num_blocks]

    def use_of(self, layer: int) -> int:
        """Return the number of a layer among those that use a block."""
        return self.layers.index(layer)

    def block_of(self, layer: int) -> int:
        """Return the number of the block that a layer uses."""
        return self.use_of(layer) % self.num_blocks

    def uses_of(self, block: int) -> range:
        """Return the numbers of a block's uses, in each of which it has other adapters."""
        return range(block, len(self.layers), self.num_blocks)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The projections of attention that have adapters: q, k and v."""
        return ("q", "k", "v") if self.attention_adapters else ()

    def tensors(
        self, layer: int, hidden: int, sections: tuple[int, int, int], inner: int
    ) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of a layer that uses a block, by name in the layer.

        Args:
            layer: the number of the layer.
            hidden: size of a row of hidden states.
            sections: sizes of queries, keys and values.
            inner: size of a row between the projections of the MLP.
        """
        yield "linear.weight", TensorSpec((hidden, hidden), Role.LINEAR)
        if layer not in self.owners:
            return
        attention, mlp, read = f"{BLOCK}.self_attn", f"{BLOCK}.feed_forward", 2 * hidden
        for name, size in zip(("q", "k", "v"), sections, strict=True):
            yield from linear_tensors(f"{attention}.{name}_proj", read, size, False, 0)
        yield from linear_tensors(f"{attention}.o_proj", sections[0], hidden, False, 1)
        halves = inner, inner
        yield from linear_tensors(f"{mlp}.gate_up_proj", hidden, 2 * inner, self.bias, 0, halves)
        yield from linear_tensors(f"{mlp}.down_proj", inner, hidden, self.bias, 1)
        yield f"{BLOCK}.input_layernorm.weight", TensorSpec((read,), Role.NORM)
        yield f"{BLOCK}.pre_ff_layernorm.weight", TensorSpec((hidden,), Role.NORM)
        for use in self.uses_of(self.block_of(layer)):
            for name, size in zip(self.adapters, sections, strict=False):
                adapter = f"{attention}.linear_{name}_adapter_list.{use}"
                yield from _adapter(adapter, read, self.rank, size)
            adapter = f"{mlp}.gate_up_proj_adapter_list.{use}"
            yield from _adapter(adapter, hidden, self.rank, 2 * inner, halves)

    def num_read_again(self, hidden: int, sections: tuple[int, int, int], inner: int) -> int:
        """Return the number of weights of blocks that a step reads after their first use."""
        return sum(
            spec.num_elements * (len(self.uses_of(block)) - 1)
            for block, layer in enumerate(self.owners)
            for name, spec in self.tensors(layer, hidden, sections, inner)
            if name.startswith(BLOCK) and "_adapter_list." not in name
        )


def _adapter(
    name: str, inputs: int, rank: int, outputs: int, sections: tuple[int, ...] = ()
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the two weights of an adapter; ranks divide its outputs."""
    yield f"{name}.0.weight", TensorSpec((rank, inputs), Role.LINEAR)
    yield from linear_tensors(f"{name}.1", rank, outputs, False, 0, sections)
