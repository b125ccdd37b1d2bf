"""Reference for the choice of `paged_kernels.splits`: the modeled times, in Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paged_kernels.splits import SplitShape


def modeled_us(shape: SplitShape, tiles: Sequence[int], size: int) -> float:
    """Return the modeled microseconds of attention with items of these numbers of tiles.

    Args:
        shape: what determines the plan besides the lengths.
        tiles: number of tiles of each item.
        size: tiles of a split; a multiple of it, if any item is longer.
    """
    costs, wave = shape.costs, shape.programs_per_wave
    counts = [-(-each // size) for each in tiles]
    programs, most = sum(counts) * shape.programs_per_split, max(counts, default=0)

    def together_us(count: float) -> float:
        return size * math.hypot(costs.tile, count * costs.share)

    full = sum(tiles) * shape.programs_per_split / size
    time_us = costs.start + together_us(full)
    if programs > wave:
        rest, waves = programs % wave, full / wave
        last_us = together_us(rest) - rest / wave * together_us(wave) if rest else 0.0
        alone_us = (
            size * (1 - waves) * costs.tile
        )  # left of a full split when short ones have ended
        time_us = costs.start + waves * together_us(wave) + max(0.0, last_us, alone_us)
    if most > 1:
        time_us += costs.merge + costs.merge_split * most
        divided = sum(count for count in counts if count > 1)
        time_us += costs.merge_program * divided * shape.programs_per_split
    return time_us
