"""Launch configurations of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from paged_kernels.tuning.split_costs import SplitCosts


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch configuration of the prefill kernel."""

    rows: int  # per program: queries times heads of a group
    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int
    costs: SplitCosts
    # Per thread; None leaves the choice to the assembler.
    max_registers: int | None = None


_PREFILL_COSTS = SplitCosts(
    start=6.4, tile=1.59, share=0.0, merge=2.4, merge_split=1.24, merge_program=0.011
)


def prefill_config(arch: int, head_dim: int, item_size: int) -> PrefillConfig:
    """Return the configuration for heads of `head_dim` (padded) and `item_size`-byte queries."""
    costs = _PREFILL_COSTS
    # Left alone, the assembler for the B200 spills to fit one more program on a multiprocessor.
    registers = 255 if arch >= 100 else None
    if item_size == 4:
        if head_dim > 256:
            return PrefillConfig(16, 16, 16, num_stages=2, costs=costs, max_registers=128)
        tile = 32 if head_dim <= 128 else 16
        return PrefillConfig(16, tile, 8, num_stages=2, costs=costs, max_registers=registers)
    if head_dim <= 64:
        return PrefillConfig(128, 64, 8, num_stages=3, costs=costs, max_registers=registers)
    if head_dim <= 128:
        return PrefillConfig(128, 64 if arch >= 90 else 32, 8, num_stages=3, costs=costs)
    if head_dim > 256:  # more rows than 32 are spilled; the times have not been measured
        return PrefillConfig(32, 32, 8, num_stages=2, costs=costs)
    return PrefillConfig(64, 64 if arch >= 100 else 32, 8, num_stages=2, costs=costs)
