"""Launch configurations of latent attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paged_kernels.tuning.split_costs import SplitCosts, memory_us


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Launch configuration of latent attention."""

    rows: int  # per program: queries times heads
    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int  # tiles in flight
    costs: SplitCosts


_LATENT_COSTS = SplitCosts(
    start=4.0, tile=1.39, share=0.0, merge=3.9, merge_split=0.5, merge_program=0.0067
)


def latent_config(arch: int, width: int, item_size: int, rows: int) -> LatentConfig:
    """Return the configuration for rows of the cache with `width` (padded) numbers.

    A program has up to `rows` queries times heads, of `item_size` bytes a number. An H200 was
    measured; its tensor cores reach their full rate with 64 rows, for which wide rows leave too
    little shared memory.
    """
    if item_size == 4:  # float32 cannot use tensor cores, so registers decide
        config = LatentConfig(16, 16, 8, 1, _LATENT_COSTS)
    elif rows <= 16:
        tile = 128 if 90 <= arch < 120 else 64
        config = LatentConfig(16, tile, 8, 2, replace(_LATENT_COSTS, tile=2.5))
    elif arch == 90 and width <= 576:
        config = LatentConfig(64, 64, 8, 2, replace(_LATENT_COSTS, tile=4.6, merge_split=2.0))
    else:
        config = LatentConfig(32, 64, 8, 2, replace(_LATENT_COSTS, tile=4.2))
    share = memory_us(arch, config.tile * width * item_size)
    return replace(config, costs=replace(config.costs, share=share))
