"""The parts of modules with a state that each of several ranks computes.

Heads, channels or blocks are divided, and the last linear layer adds up what the ranks compute. So
a rank keeps a part of each state, and convolves and decays it without the others.
"""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.mamba import Mamba1Shape, Mamba2Shape
from paged_backend.checkpoint.mixers import (
    DeltaShape,
    KimiDeltaShape,
    LightningShape,
    RgLruShape,
    ShortConvShape,
    StateMixer,
)
from paged_backend.values.errors import option_error

OPTION = "tensor_parallel_size"

Mixers = tuple[StateMixer | None, ...]
"""The module with a state of each layer; None for a layer without."""


def divide_mixers(mixers: Mixers, num_ranks: int) -> Mixers:
    """Return the parts of the modules that each of several ranks computes.

    Raises:
        ConfigError: a size does not divide.
    """
    return tuple(mixer and _divide(mixer, num_ranks) for mixer in mixers)


def part_of(size: int, num_ranks: int, name: str) -> int:
    """Return a rank's part of a number of things.

    Args:
        size: the number.
        num_ranks: the number of ranks.
        name: what the things are, for the error.

    Raises:
        ConfigError: the number does not divide.
    """
    if size % num_ranks:
        raise option_error(OPTION, f"must divide the model's {size} {name}; got {num_ranks}")
    return size // num_ranks


def _divide(mixer: StateMixer, num_ranks: int) -> StateMixer:
    name = mixer.name
    match mixer:
        case DeltaShape():
            keys = part_of(mixer.num_key_heads, num_ranks, f"heads of keys of {name}")
            values = part_of(mixer.num_value_heads, num_ranks, f"heads of values of {name}")
            return replace(mixer, num_key_heads=keys, num_value_heads=values)
        case KimiDeltaShape():
            heads = part_of(mixer.num_heads, num_ranks, f"heads of {name}")
            return replace(mixer, num_heads=heads)
        case LightningShape():  # the norm sums up the squares of all heads
            if num_ranks > 1:
                problem = f"can only be 1 for lightning attention; got {num_ranks}"
                raise option_error(OPTION, problem)
            return mixer
        case Mamba1Shape():
            channels = part_of(mixer.values_size, num_ranks, f"channels of {name}")
            return replace(mixer, values_size=channels)
        case Mamba2Shape():
            heads = part_of(mixer.num_heads, num_ranks, f"heads of {name}")
            return _divide_groups(replace(mixer, num_heads=heads), num_ranks)
        case RgLruShape():
            blocks = part_of(mixer.num_blocks, num_ranks, f"blocks of {name}")
            return replace(mixer, num_blocks=blocks, values_size=blocks * mixer.block_size)
        case ShortConvShape():
            part_of(mixer.values_size, num_ranks, f"channels of {name}")
            return replace(mixer, num_ranks=num_ranks)


def _divide_groups(mixer: Mamba2Shape, num_ranks: int) -> Mamba2Shape:
    """Divide the groups of heads; if there are few, several ranks have the vectors of the same one.

    If a group also has a norm, ranks can only be parts of it if it is the only one: they all sum up
    its squares then.
    """
    groups = mixer.num_groups
    if groups == 1:
        return replace(mixer, divided_norm=mixer.normed and num_ranks > 1)
    if num_ranks > groups and num_ranks % groups == 0 and not mixer.normed:
        return replace(mixer, num_groups=1)
    groups = part_of(groups, num_ranks, f"groups of heads of {mixer.name}")
    return replace(mixer, num_groups=groups)
