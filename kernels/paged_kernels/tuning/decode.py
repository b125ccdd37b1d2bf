"""Launch configurations of decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paged_kernels.tuning.split_costs import SplitCosts, memory_us

FEW_PROGRAMS = 32
"""Programs of a launch without splits up to which the plan gives a multiprocessor one program."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch configuration of the split kernel of decoding."""

    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int  # tiles in flight; the block ids take one of them
    programs_per_sm: int  # that a plan lets a multiprocessor run at the same time
    costs: SplitCosts
    # Per thread. Without a setting the assembler spills to fit more programs than the shared memory
    # has room for; 168 lets three programs of 4 warps share a multiprocessor, and 128 lets four.
    max_registers: int = 255


def decode_config(
    arch: int,
    head_dim: int,
    item_size: int,
    rows: int,
    *,
    quantized: bool,
    few: bool = False,
    large: bool = False,
) -> DecodeConfig:
    """Return the configuration for tiles of `rows` queries times heads.

    `head_dim` is padded to a power of 2; queries have `item_size` bytes per element, and the cache
    may be `quantized`. With `few` programs without splits, at most `FEW_PROGRAMS`, each program
    keeps more tiles in flight. A `large` kernel, which also stores log-sum-exps or has a window of
    chunks, needs more registers than the others have.
    """
    cached_size = 1 if quantized else item_size

    def costs(tile: int) -> SplitCosts:
        found = _decode_costs(arch, 2 * tile * head_dim * cached_size)
        return found if head_dim <= 128 else replace(found, merge_split=0.2)

    if head_dim > 256:
        return _wide_decode_config(arch, item_size, rows, costs)
    if item_size == 4:  # float32 cannot use tensor cores, so registers decide
        programs = 1 if rows > 16 or (arch < 90 and head_dim > 128) else 2
        tile = 16 if head_dim > 64 else 32
        return DecodeConfig(tile, 8, 3, programs_per_sm=programs, costs=costs(tile))
    if rows > 16:
        stages = 3 if arch >= 90 else 2
        tile = 64 if head_dim <= 128 and arch >= 90 else 32
        return DecodeConfig(tile, 8, stages, programs_per_sm=1, costs=costs(tile))
    tile = {64: 128, 128: 64, 256: 32}.get(max(64, head_dim), 64)
    if arch == 90 and head_dim == 256 and not quantized:  # measured on an H200
        return DecodeConfig(tile, 4, 4, programs_per_sm=2, costs=costs(tile))
    if arch == 90 and head_dim == 128 and not quantized:  # measured on an H200
        if few:
            alone = SplitCosts(
                start=2.7, tile=1.34, share=0.0, merge=3.2, merge_split=0.0, merge_program=0.0073
            )
            return DecodeConfig(tile, 4, 3, programs_per_sm=1, costs=alone, max_registers=168)
        if not large:
            return DecodeConfig(tile, 4, 2, programs_per_sm=4, costs=costs(tile), max_registers=128)
    registers = 200 if arch >= 100 or quantized else 168
    # Programs on a multiprocessor: limited by registers (169 to 177 a thread in most binaries for
    # the B200), or by the A100's shared memory.
    programs = 3 if arch == 90 and not quantized else 2
    if arch in (86, 89) and not quantized:
        programs = 1  # a program needs 71 KiB of 100 KiB of shared memory
    return DecodeConfig(tile, 4, 3, programs, costs(tile), max_registers=registers)


def _wide_decode_config(
    arch: int, item_size: int, rows: int, costs: Callable[[int], SplitCosts]
) -> DecodeConfig:
    """Return the configuration for heads of 512, whose rows take twice the registers of 256.

    That for 16-bit keys and few rows was measured on an H200.
    """
    if item_size == 4:
        return DecodeConfig(16, 16, 2, programs_per_sm=1, costs=costs(16), max_registers=128)
    if rows > 16:
        return DecodeConfig(32, 8, 2, programs_per_sm=1, costs=costs(32))
    programs = 1 if arch in (86, 89) else 2  # limited by shared memory
    return DecodeConfig(16, 4, 3, programs, costs(16))


def _decode_costs(arch: int, tile_bytes: int) -> SplitCosts:
    """Return the costs for tiles of this size, by those of an H200 for 32 KiB."""
    return SplitCosts(
        start=4.0,
        tile=1.39,
        share=memory_us(arch, tile_bytes),
        merge=3.9,
        merge_split=0.0,
        merge_program=0.0067,
    )
