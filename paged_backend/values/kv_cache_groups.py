"""KV cache groups: layers that share a block table, and the number of blocks that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paged_backend.values.windows import Chunks, Window, first_visible, window_size

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


class LayerKind(NamedTuple):
    """What layers of a group have in common.

    Attributes:
        window: the positions that a token sees; None for all up to its own.
        kept: what each layer keeps for a token; None if all layers of the model keep the same.
    """

    window: Window | None
    kept: KVSizes | None = None

    @property
    def numbers(self) -> int:
        """The numbers that a layer keeps for a token; 1 if all layers keep the same."""
        return 1 if self.kept is None else self.kept.numbers


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers of one kind. Each sequence has one block table for all of them.

    Attributes:
        window: the positions that a token sees; None for all up to its own.
        layers: the numbers of the layers, in the order in which they follow each other in a block.
    """

    window: Window | None
    layers: tuple[int, ...]


NO_LAYERS = (KVCacheGroup(None, ()),)
"""The groups of a model without attention: block tables count tokens for the prefix cache."""


def layer_kinds(
    windows: Sequence[Window | None], kept: Sequence[KVSizes] | None = None
) -> list[LayerKind]:
    """Return the kind of each layer.

    Args:
        windows: the window of each layer; None for all positions.
        kept: what each layer keeps for a token; None if all keep the same.
    """
    if kept is None or len(set(kept)) <= 1:
        return [LayerKind(window) for window in windows]
    return [LayerKind(window, sizes) for window, sizes in zip(windows, kept, strict=True)]


def group_layers(
    windows: Sequence[Window | None], max_model_len: int, kept: Sequence[KVSizes] | None = None
) -> tuple[KVCacheGroup, ...]:
    """Divide the layers of a model into groups that keep as many numbers of a token, or nearly.

    All groups take their blocks from one pool, so a block has room for the same numbers in each
    group. Layers of one kind have the same window and keep the same; a kind of which a block does
    not hold all layers becomes several groups. Some blocks have more room than their layers need.
    The room is the one with which a sequence of ``max_model_len`` tokens holds the fewest bytes,
    among those that lead to at most ``MAX_GROUPS`` groups, and the largest of equals.

    Args:
        windows: the window of each layer; None for all positions. A window that no sequence exceeds
            counts as None.
        max_model_len: maximum number of tokens of a sequence.
        kept: what each layer keeps for a token; None if all keep the same.
    """
    return tuple(
        KVCacheGroup(kind.window, layers)
        for kind, groups in _divided(layer_kinds(windows, kept), max_model_len).items()
        for layers in groups
    )


def group_layers_of_stage(
    windows: Sequence[Window | None],
    max_model_len: int,
    layers: range,
    kept: Sequence[KVSizes] | None = None,
) -> tuple[KVCacheGroup, ...]:
    """Divide the layers of a stage of a model into the groups of the whole model.

    A sequence has the same block tables in all stages, so that each stage has all groups. It
    divides its layers of a kind evenly among the groups of this kind, some of which may be empty.

    Args:
        windows: the window of each layer of the whole model; see `group_layers`.
        max_model_len: maximum number of tokens of a sequence.
        layers: the numbers of the stage's layers.
        kept: what each layer of the whole model keeps for a token; None if all keep the same.
    """
    found: list[KVCacheGroup] = []
    for kind, groups in _divided(layer_kinds(windows, kept), max_model_len).items():
        own = [layer for group in groups for layer in group if layer in layers]
        size = -(-len(own) // len(groups))
        for number in range(len(groups)):
            part = tuple(own[number * size : (number + 1) * size])
            found.append(KVCacheGroup(kind.window, part))
    return tuple(found)


def _divided(
    layers: Sequence[LayerKind], max_model_len: int
) -> dict[LayerKind, list[tuple[int, ...]]]:
    """Return the groups of each kind of layers, as the numbers of their layers."""
    kinds: dict[LayerKind, list[int]] = {}
    for layer, (window, kept) in enumerate(layers):
        is_limit = window is not None and window_size(window) < max_model_len
        limit = window if is_limit else None
        kinds.setdefault(LayerKind(limit, kept), []).append(layer)
    room = _room({kind: len(found) for kind, found in kinds.items()}, max_model_len)
    divided = {}
    for kind, found in kinds.items():
        size = room // kind.numbers
        divided[kind] = [tuple(found[start : start + size]) for start in range(0, len(found), size)]
    return divided


def _room(num_layers: dict[LayerKind, int], max_model_len: int) -> int:
    """Return the best room of a block, in numbers of a token, for the layers of each kind."""

    def num_groups(room: int) -> dict[LayerKind, int]:
        return {kind: -(-count // (room // kind.numbers)) for kind, count in num_layers.items()}

    def numbers_held(room: int) -> int:
        """Numbers for a token in the blocks that a longest sequence holds."""
        groups = num_groups(room).items()
        return room * sum(count * _most_held(kind, max_model_len) for kind, count in groups)

    least, most = max(kind.numbers for kind in num_layers), max(MAX_GROUPS, len(num_layers))
    rooms = {kind.numbers * size for kind, n in num_layers.items() for size in range(1, n + 1)}
    allowed = (
        room
        for room in sorted(rooms, reverse=True)
        if room >= least and sum(num_groups(room).values()) <= most
    )
    return min(allowed, key=numbers_held)


def _most_held(kind: LayerKind, max_model_len: int) -> int:
    """Return the most tokens of a sequence that its next one sees in a layer of a kind."""
    return max_model_len if kind.window is None else window_size(kind.window)


MAX_CHECKPOINTS = 512
"""The largest number of slots for states beside those of running sequences."""

MIN_STATE_SLOTS = 3
"""The state at the start of a sequence, the state of one sequence, and its next one."""


def num_state_slots(
    pool_bytes: int, slot_bytes: int, max_num_seqs: int, *, alone: bool = False
) -> int:
    """Return the number of slots that are useful, in at most half of the bytes of a pool.

    Each running sequence has a slot, and may write to another one.

    Args:
        pool_bytes: bytes for blocks and slots.
        slot_bytes: bytes of the state of a sequence in all layers.
        max_num_seqs: the largest number of running sequences.
        alone: blocks take no bytes, so that slots may have all bytes of the pool.
    """
    room = pool_bytes if alone else pool_bytes // 2
    return min(most_state_slots(max_num_seqs), room // slot_bytes)


def most_state_slots(max_num_seqs: int) -> int:
    """Return the number of slots that are useful, whatever the memory."""
    return 1 + 2 * max_num_seqs + MAX_CHECKPOINTS


class StateChunks(NamedTuple):
    """The tokens that a platform computes together for states of sequences.

    A chunk begins at each multiple of ``size`` tokens of a text. A bit of a state may depend on
    where a step divides a chunk, but not on a division between two chunks.
    """

    size: int  # a power of two
    few: int  # a step computes at most this many tokens of a sequence one by one, more in chunks


class StateLayout(NamedTuple):
    """The slots for the states of sequences, which some layers keep beside tokens' blocks."""

    num_slots: int  # with slot 0, which stands for the state at the start of a sequence
    interval: int  # tokens between the states that the prefix cache keeps; 0: it keeps none
    chunks: StateChunks | None = None  # None: the platform computes all tokens one by one

    @property
    def num_sequences(self) -> int:
        """The number of sequences that can run at once: each may need a second slot in a step."""
        return (self.num_slots - 1) // 2


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
    windows: tuple[Window | None, ...] = (None,)
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
    def sliding(self) -> Iterator[tuple[int, Window]]:
        """The groups with a window, each with its number and its window."""
        for group, window in enumerate(self.windows):
            if window is not None:
                yield group, window

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks of one group that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def first_visible_block(self, position: int, window: Window) -> int:
        """Return the first entry of a block table with a token that the one at ``position`` sees.

        No later token sees an earlier entry.
        """
        return first_visible(position, window) // self.block_size

    def num_invisible_blocks(self, position: int) -> int:
        """Return the number of blocks of all groups that no token from ``position`` on sees."""
        return sum(self.first_visible_block(position, window) for _, window in self.sliding)

    def max_blocks(self, num_computed_tokens: int, num_tokens: int) -> int:
        """Return the number of blocks, over all groups, that a sequence holds at most at a time.

        This holds while its tokens from ``num_computed_tokens`` to ``num_tokens`` - 1 are computed,
        however they are divided into steps, if the blocks that no later token sees are freed before
        each step. A group without a window holds the blocks of all tokens. In a group with a
        window, a step that computes n tokens reads and writes window - 1 + n of them, which do not
        begin at the border of a block, unless chunks do::

            tokens      |<- window - 1 ->|<- n tokens ->|
            blocks   |       |       |       |       |       |
        """
        blocks = self.num_blocks_for(num_tokens)
        total = 0
        for window in self.windows:
            if window is None:
                total += blocks
            else:
                span = window_size(window) - 1 + self.max_num_batched_tokens
                most = self._most_blocks(span, window)
                left = blocks - self.first_visible_block(num_computed_tokens, window)
                total += min(most, left)
        return total

    def _most_blocks(self, span: int, window: Window) -> int:
        """Return the most blocks that `span` tokens from the first visible one on lie in."""
        if isinstance(window, Chunks) and window.size % self.block_size == 0:
            return self.num_blocks_for(span)
        return (span + self.block_size - 2) // self.block_size + 1

    def blocks_of_decode(self, num_tokens: int) -> int:
        """Return the number of blocks that a sequence of ``num_tokens`` tokens holds in a decode.

        With a window, this is the maximum; it depends on the place of the window in its blocks.
        """
        return replace(self, max_num_batched_tokens=1).max_blocks(0, num_tokens)

    def num_sequences(self, num_blocks: int, num_tokens: int) -> int:
        """Return the number of sequences of ``num_tokens`` tokens that fit in a pool at once.

        One of them computes its prompt, which takes more blocks in groups with a window. Slots for
        states may be fewer.
        """
        left = num_blocks - self.max_blocks(0, num_tokens)
        number = 1 + left // self.blocks_of_decode(num_tokens) if left >= 0 else 0
        return number if self.states is None else min(number, self.states.num_sequences)


MAX_EMPTY_BLOCKS = 2**17
"""The largest number of blocks without bytes, unless one sequence needs more."""


def num_empty_blocks(layout: KVCacheLayout, num_slots: int, max_model_len: int) -> int:
    """Return the number of blocks of a model without attention, with the null block.

    They take a little memory of the host, and count tokens for the prefix cache. There are enough
    for the longest sequences with states in all slots, up to `MAX_EMPTY_BLOCKS`.

    Args:
        layout: the block tables.
        num_slots: slots for states.
        max_model_len: tokens of the longest sequence.
    """
    longest = layout.max_blocks(0, max_model_len)
    return 1 + max(longest, min(MAX_EMPTY_BLOCKS, num_slots * longest))
