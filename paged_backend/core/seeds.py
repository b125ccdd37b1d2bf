"""Seeds of sequences: 64 bits, different for each completion of a request."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix64(value: int) -> int:
    """Scramble 64 bits so that near inputs give unrelated outputs (SplitMix64's finalizer)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of completion ``index`` of a request; completion 0 has the request's seed."""
    return seed if index == 0 else mix64(seed + index * 0x9E3779B97F4A7C15)
