"""KV cache groups: layers that share a block table, and the number of blocks that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

MAX_GROUPS = 8
"""Number of groups that a model should not exceed: each one adds a block table to each sequence."""


class KVSizes(NamedTuple):
    """The numbers that a layer keeps for each token."""

    num_heads: int
    key_dim: int  # numbers of a head's key
    value_dim: int  # numbers of a head's value; 0 if values are parts of the keys

    @property
    def numbers(self) -> int:
        """The numbers of a token's keys and values."""
        return self.num_heads * (self.key_dim + self.value_dim)

    @property
    def vectors(self) -> int:
        """The vectors of a token, each of which may have a scale."""
        return self.num_heads * (2 if self.value_dim else 1)


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with the same window. Each sequence has one block table for all of them.

    Attributes:
        window: the number of positions that a token sees, its own included; None for all.
        layers: the numbers of the layers. The keys and values of the layer in place i are in part i
            of the KV pool.
    """

    window: int | None
    layers: tuple[int, ...]


def group_layers(windows: Sequence[int | None], max_model_len: int) -> tuple[KVCacheGroup, ...]:
    """Divide the layers of a model into groups of equal size.

    All groups take their blocks from one pool, so a block has room for the same number of layers in
    each group. A kind of layers (those with the same window) with more layers than the group size
    becomes several groups. The last group of a kind may have fewer layers than its blocks have room
    for. The group size is the one with which a sequence of ``max_model_len`` tokens holds the
    fewest bytes, among those that lead to at most ``MAX_GROUPS`` groups, and the largest of equals.

    Args:
        windows: the window of each layer; None for all positions. A window that no sequence exceeds
            counts as None.
        max_model_len: maximum number of tokens of a sequence.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        limit = None if window is None or window >= max_model_len else window
        kinds.setdefault(limit, []).append(layer)
    size = _group_size({window: len(layers) for window, layers in kinds.items()}, max_model_len)
    return tuple(
        KVCacheGroup(window, tuple(layers[start : start + size]))
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    )


def group_layers_of_stage(
    windows: Sequence[int | None], max_model_len: int, layers: range
) -> tuple[KVCacheGroup, ...]:
    """Divide the layers of a stage of a model into the groups of the whole model.

    A sequence has the same block tables in all stages, so that each stage has all groups. It
    divides its layers of a kind evenly among the groups of this kind, some of which may be empty.

    Args:
        windows: the window of each layer of the whole model; see `group_layers`.
        max_model_len: maximum number of tokens of a sequence.
        layers: the numbers of the stage's layers.
    """
    found: list[KVCacheGroup] = []
    for window, alike in groupby(group_layers(windows, max_model_len), lambda group: group.window):
        groups = list(alike)
        own = [layer for group in groups for layer in group.layers if layer in layers]
        size = -(-len(own) // len(groups))
        for number in range(len(groups)):
            found.append(KVCacheGroup(window, tuple(own[number * size : (number + 1) * size])))
    return tuple(found)


def _group_size(num_layers: dict[int | None, int], max_model_len: int) -> int:
    """Return the best group size for the number of layers of each kind."""

    def num_groups(size: int) -> dict[int | None, int]:
        return {window: -(-count // size) for window, count in num_layers.items()}

    def places_held(size: int) -> int:
        """Places for a token of a layer in the blocks that a longest sequence holds."""
        groups = num_groups(size).items()
        return size * sum(count * (window or max_model_len) for window, count in groups)

    most = max(MAX_GROUPS, len(num_layers))
    sizes = range(max(num_layers.values()), 0, -1)
    allowed = (size for size in sizes if sum(num_groups(size).values()) <= most)
    return min(allowed, key=places_held)


class StateLayout(NamedTuple):
    """The slots for the states of sequences, which some layers keep beside tokens' blocks."""

    num_slots: int  # with slot 0, which stands for the state at the start of a sequence
    interval: int  # tokens between the states that the prefix cache keeps; 0: it keeps none


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The groups as the scheduler sees them, and the number of blocks that a sequence needs.

    Block tables have one entry for each group and each ``block_size`` tokens. All block tables of a
    sequence have the same length; they are stored as one list, in which the entries of the groups
    for the same tokens follow each other.

    Attributes:
        block_size: number of tokens in a block.
        max_num_batched_tokens: maximum number of tokens that a step computes.
        windows: the window of each group; None if its tokens see all positions. Empty for a model
            without a KV cache, which computes a whole prompt in one step.
        states: slots for the states of sequences; None if no layer keeps a state.
    """

    block_size: int
    max_num_batched_tokens: int
    windows: tuple[int | None, ...] = (None,)
    states: StateLayout | None = None

    @property
    def num_groups(self) -> int:
        """Number of groups, which is the number of blocks for the same tokens."""
        return len(self.windows)

    @property
    def has_blocks(self) -> bool:
        """True if tokens have keys and values in a KV cache."""
        return bool(self.windows)

    @property
    def sliding(self) -> Iterator[tuple[int, int]]:
        """The groups with a window, each with its number and its window."""
        for group, window in enumerate(self.windows):
            if window is not None:
                yield group, window

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks of one group that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def first_visible_block(self, position: int, window: int) -> int:
        """Return the first entry of a block table with a token that the one at ``position`` sees.

        No later token sees an earlier entry.
        """
        return max(0, position - window + 1) // self.block_size

    def num_invisible_blocks(self, position: int) -> int:
        """Return the number of blocks of all groups that no token from ``position`` on sees."""
        return sum(self.first_visible_block(position, window) for _, window in self.sliding)

    def max_blocks(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Return the number of blocks, over all groups, that a sequence holds at most at a time.

        This holds while its tokens from ``num_computed_tokens`` to ``num_tokens`` - 1 are computed,
        however they are divided into steps, if the blocks that no later token sees are freed before
        each step. A group without a window holds the blocks of all tokens. In a group with a
        window, a step that computes n tokens reads and writes window - 1 + n of them, which do not
        begin at the border of a block::

            tokens      |<- window - 1 ->|<- n tokens ->|
            blocks   |       |       |       |       |       |
        """
        blocks = self.num_blocks_for(num_tokens)
        total = 0
        for window in self.windows:
            if window is None:
                total += blocks
            else:
                span = window - 1 + self.max_num_batched_tokens
                most = (span + self.block_size - 2) // self.block_size + 1
                left = blocks - self.first_visible_block(num_computed_tokens, window)
                total += min(most, left)
        return total

    def blocks_of_decode(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence of ``num_tokens`` tokens holds in a decode.

        With a window, this is the maximum; it depends on the place of the window in its blocks.
        """
        return replace(self, max_num_batched_tokens=1).max_blocks(0, num_tokens)

    def num_sequences(self, num_blocks: int, num_tokens: int) -> int:
        """Return the number of sequences of ``num_tokens`` tokens that fit in a pool at once.

        One of them computes its prompt, which takes more blocks in groups with a window.
        """
        left = num_blocks - self.max_blocks(0, num_tokens)
        return 1 + left // self.blocks_of_decode(num_tokens) if left >= 0 else 0
