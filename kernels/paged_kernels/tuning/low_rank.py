"""Launch configurations of products of low rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LowRankConfig:
    """Launch configuration of both products of low rank."""

    rows: int  # rows of a program
    programs: int  # programs among which the slots of a tile of rows are divided
    columns: int  # columns of `shrink` per loop iteration
    features: int  # features of a program of `expand`
    split: bool  # whether splits of K are programs of their own
    num_warps: int
    num_stages: int


def low_rank_config(rows: int, max_rank: int, item_size: int) -> LowRankConfig:
    """Return the configuration for `rows` of `item_size`-byte numbers.

    In decodes each row may have another slot, so a tile has as many programs as rows. Tiles of
    prompts have few slots, and programs that find none take time, too.
    """
    columns = 128 if item_size == 2 else 32
    if rows <= 1024:
        programs = 16 if rows <= 64 else 8 if rows <= 256 else 2
        stages = 4 if item_size == 2 else 3
        return LowRankConfig(16, programs, columns, 64, True, 4, stages)
    return LowRankConfig(32, 2, columns, 64, False, 8 if max_rank == 64 else 4, 3)


def shrink_splits(width: int) -> tuple[int, int]:
    """Return the number of splits of K = `width` for products of low rank, and their size.

    The size is a multiple of 128 columns, at least 512; there are at most 8 splits.
    """
    wanted = min(-(-width // 512), 8)
    size = 128 * -(-width // (128 * wanted))
    return -(-width // size), size
