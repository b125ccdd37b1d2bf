"""The parts of the time of attention by which its keys are divided among programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """Parts of the time of attention over splits of the keys, in microseconds.

    The plan of the splits chooses by them. They were fitted to times on an H200, in
    `decode-attention-h200.json` and `prefill-attention-h200.json` of `loadtest/results/`.
    """

    start: float  # the start of a launch, until its first keys arrive
    tile: float  # a tile of keys, while few programs run
    share: float  # a tile, for each program that runs: the time of its bytes at the memory's rate
    merge: float  # the merges, if any item is divided
    merge_split: float  # the merges, for each split of the item with most of them
    merge_program: float  # the merges, for each program of a divided item


# Bytes that the memory delivers per microsecond if all programs ask for them: A100, H200, B200.
_MEMORY_RATES = {80: 1.8e6, 90: 4.8e6, 100: 7.2e6}


def memory_us(arch: int, num_bytes: int) -> float:
    """Return the microseconds in which the memory delivers bytes if all programs ask for some."""
    rate = _MEMORY_RATES[100 if arch >= 100 else 90 if arch >= 90 else 80]
    return num_bytes / rate
