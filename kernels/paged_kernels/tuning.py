"""Launch configurations, chosen offline; nothing is tuned or compiled while serving.

Each function is a table, by architecture and by what decides the registers and shared memory of a
program: the first line that fits applies, the last is the default. `python -m paged_kernels.aot`
shows what the compiler makes of each, `kernels/benchmarks/bench_paged_decode.py --sweep` (and
`bench_paged_prefill.py`) what a device makes of their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the split kernel of decoding is launched."""

    tile: int  # keys in one pass of the loop
    num_warps: int
    num_stages: int  # tiles under way; one of them is taken by the block ids
    programs_per_sm: int  # to cut the work into, at least
    # For each thread. Left to itself the assembler spills to make room for programs that the
    # shared memory has no room for; 168 lets three programs of 4 warps share a multiprocessor.
    max_registers: int = 255


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the prefill kernel is launched."""

    rows: int  # queries times heads of a group in one program
    tile: int  # keys in one pass of the loop
    num_warps: int
    num_stages: int


def decode_config(
    arch: int, head_dim: int, item_size: int, rows: int, quantized: bool
) -> DecodeConfig:
    """For `rows` queries with heads of `head_dim` (padded), `item_size` bytes an element."""
    if item_size == 4:  # float32 has no tensor cores: registers decide
        return DecodeConfig(16 if head_dim > 64 else 32, 8, 3, programs_per_sm=2)
    if rows > 16:
        stages = 3 if arch >= 90 else 2
        return DecodeConfig(
            64 if head_dim <= 128 and arch >= 90 else 32, 8, stages, programs_per_sm=2
        )
    tile = {64: 128, 128: 64, 256: 32}.get(max(64, head_dim), 64)
    registers = 200 if arch >= 100 or quantized else 168
    return DecodeConfig(tile, 4, 3, programs_per_sm=4, max_registers=registers)


def prefill_config(arch: int, head_dim: int, item_size: int) -> PrefillConfig:
    """For heads of `head_dim` (padded) and queries of `item_size` bytes an element."""
    if item_size == 4:
        return PrefillConfig(16, 32 if head_dim <= 128 else 16, num_warps=8, num_stages=2)
    if head_dim <= 64:
        return PrefillConfig(128, 64, num_warps=8, num_stages=3)
    if head_dim <= 128:
        return PrefillConfig(128, 64 if arch >= 90 else 32, num_warps=8, num_stages=3)
    return PrefillConfig(64, 64 if arch >= 100 else 32, num_warps=8, num_stages=2)
