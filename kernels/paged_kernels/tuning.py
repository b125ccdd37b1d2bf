"""Launch configurations, chosen offline; nothing is tuned or compiled while serving.

Each function is a table, keyed by architecture and the values that determine the registers and
shared memory of a program: the first line that fits applies, the last is the default.
`python -m paged_kernels.aot` shows the compiled result of each configuration;
`kernels/benchmarks/run_one.py paged_decode --sweep` (and `paged_prefill`) times neighboring
configurations on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


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


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """Launch configuration of a product.

    Bits of a result must not depend on it, so it has nothing that changes the order of a sum.
    """

    rows: int  # rows of activations per program
    features: int  # features of weights per program
    num_warps: int
    num_stages: int  # tiles in flight
    split: bool  # whether splits of K are programs of their own


FEW_PROGRAMS = 32
"""Programs of a launch without splits up to which the plan gives a multiprocessor one program."""

# Bytes that the memory delivers per microsecond if all programs ask for them: A100, H200, B200.
_MEMORY_RATES = {80: 1.8e6, 90: 4.8e6, 100: 7.2e6}


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
    rate = _MEMORY_RATES[100 if arch >= 100 else 90 if arch >= 90 else 80]
    return SplitCosts(
        start=4.0,
        tile=1.39,
        share=tile_bytes / rate,
        merge=3.9,
        merge_split=0.0,
        merge_program=0.0067,
    )


_PREFILL_COSTS = SplitCosts(
    start=6.4, tile=1.59, share=0.0, merge=2.4, merge_split=1.24, merge_program=0.011
)


def prefill_config(arch: int, head_dim: int, item_size: int) -> PrefillConfig:
    """Return the configuration for heads of `head_dim` (padded) and `item_size`-byte queries."""
    costs = _PREFILL_COSTS
    if item_size == 4:
        if head_dim > 256:
            return PrefillConfig(16, 16, 16, num_stages=2, costs=costs, max_registers=128)
        return PrefillConfig(16, 32 if head_dim <= 128 else 16, 8, num_stages=2, costs=costs)
    if head_dim <= 64:
        # Left alone, the assembler for the B200 spills to fit a second program.
        registers = 255 if arch >= 100 else None
        return PrefillConfig(128, 64, 8, num_stages=3, costs=costs, max_registers=registers)
    if head_dim <= 128:
        return PrefillConfig(128, 64 if arch >= 90 else 32, 8, num_stages=3, costs=costs)
    if head_dim > 256:  # more rows than 32 are spilled; the times have not been measured
        return PrefillConfig(32, 32, 8, num_stages=2, costs=costs)
    return PrefillConfig(64, 64 if arch >= 100 else 32, 8, num_stages=2, costs=costs)


_LATENT_COSTS = SplitCosts(
    start=4.0, tile=1.39, share=0.0, merge=3.9, merge_split=0.5, merge_program=0.0067
)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Launch configuration of latent attention."""

    rows: int  # per program: queries times heads
    tile: int  # keys per loop iteration
    num_warps: int
    num_stages: int  # tiles in flight
    costs: SplitCosts


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
    rate = _MEMORY_RATES[100 if arch >= 100 else 90 if arch >= 90 else 80]
    share = config.tile * width * item_size / rate
    return replace(config, costs=replace(config.costs, share=share))


def matmul_splits(features: int, width: int) -> tuple[int, int]:
    """Return the number of splits of K = `width`, and their size, a multiple of 128 columns.

    About 256 programs with 64 features each keep every multiprocessor busy, with at most 8 splits
    of at least 512 columns, as a split costs a write and a read of its sums.
    """
    wanted = max(min(256 // -(-features // 64), 8), 1)
    size = 128 * max(-(-width // (128 * wanted)), 4)
    return -(-width // size), size


def scaled_matmul_config(rows: int) -> MatmulConfig:
    """Return the configuration for `rows` of int8 or FP8."""
    if rows <= 16:
        return MatmulConfig(16, 64, num_warps=4, num_stages=4, split=True)
    if rows <= 256:
        return MatmulConfig(64, 128, num_warps=4, num_stages=4, split=True)
    return MatmulConfig(128, 128, num_warps=8, num_stages=3, split=False)


def dense_matmul_config(rows: int) -> MatmulConfig:
    """Return the configuration for `rows` of 16-bit numbers, at most 64."""
    if rows <= 16:
        return MatmulConfig(16, 64, num_warps=4, num_stages=8, split=True)
    return MatmulConfig(64, 64, num_warps=4, num_stages=6, split=True)


def gated_matmul_config(rows: int) -> MatmulConfig:
    """Return the configuration for `rows` of 16-bit numbers, at most 64, and their activation."""
    if rows <= 16:
        return MatmulConfig(16, 64, num_warps=4, num_stages=5, split=False)
    return MatmulConfig(64, 128, num_warps=4, num_stages=3, split=False)


def block_scaled_matmul_config(rows: int) -> MatmulConfig:
    """Return the configuration for `rows` of FP8 with scales for blocks."""
    if rows <= 16:
        return MatmulConfig(16, 64, num_warps=4, num_stages=4, split=True)
    if rows <= 256:
        return MatmulConfig(64, 64, num_warps=4, num_stages=4, split=True)
    return MatmulConfig(128, 64, num_warps=8, num_stages=3, split=False)


def packed_matmul_config(arch: int, rows: int, *, grouped: bool) -> MatmulConfig:
    """Return the configuration for `rows` of 16-bit numbers and weights of 4 or 8 bits.

    The sums of a group take registers, if weights have groups with a scale each. Triton 3.7 makes
    an empty kernel of tiles of 128 x 128 for a B200.
    """
    if rows <= 16:
        return MatmulConfig(16, 64, num_warps=4, num_stages=8, split=True)
    if rows <= 256:
        return MatmulConfig(64, 64, num_warps=4, num_stages=4, split=True)
    if grouped or arch >= 100:
        return MatmulConfig(64, 128, num_warps=8, num_stages=4, split=False)
    return MatmulConfig(128, 128, num_warps=8, num_stages=3, split=False)


def experts_config(rows: int, item_size: int) -> MatmulConfig:
    """Return the configuration for experts with `rows` each, on average, of `item_size` bytes."""
    if item_size == 4:  # float32 cannot use tensor cores, so registers decide
        return MatmulConfig(16, 64, num_warps=4, num_stages=2, split=False)
    if rows <= 16:
        return MatmulConfig(16, 64, num_warps=4, num_stages=4, split=False)
    if rows <= 64:
        return MatmulConfig(64, 128, num_warps=4, num_stages=4, split=False)
    return MatmulConfig(128, 128, num_warps=8, num_stages=3, split=False)


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


@dataclass(frozen=True, slots=True)
class CausalConvConfig:
    """Launch configuration of the convolution of channels."""

    rows: int  # rows of a program
    columns: int  # channels of a program
    num_warps: int


def causal_conv_config(channels: int, width: int, *, few: bool) -> CausalConvConfig:
    """Return the configuration for sequences with `few` rows each, or more.

    A program has at least the `width - 1` rows of a state. Bits of a result do not depend on it.
    """
    state, columns = 1 << (width - 2).bit_length(), 128
    while columns > 32 and columns // 2 >= channels:
        columns //= 2
    return CausalConvConfig(state if few else max(state, 16), columns, num_warps=4)


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """Launch configuration of a kernel that goes through the rows or chunks of a sequence."""

    values: int  # value channels of a state per program
    num_warps: int
    num_stages: int  # rows or chunks in flight


def scan_config(key_dim: int, value_dim: int) -> ScanConfig:
    """Return the configuration for states [key_dim, value_dim] of a head, row by row.

    It must not depend on the batch: it determines the order of sums. 32 float32 numbers of a state
    are neighbors in memory, and a thread has 32 numbers of a state with 128 keys.
    """
    values = 32
    while values > 8 and values // 2 >= value_dim:
        values //= 2
    return ScanConfig(values, num_warps=8 if key_dim > 128 else 4, num_stages=3)


def decayed_scan_config(key_dim: int, value_dim: int) -> ScanConfig:
    """Return the configuration for states with one decay for a head, row by row.

    As for `scan_config`, it must not depend on the batch. An H200 was measured.
    """
    if key_dim > 128:
        return scan_config(key_dim, value_dim)
    return ScanConfig(16 if value_dim > 8 else 8, num_warps=2, num_stages=3)


def decayed_chunks_config(arch: int, key_dim: int) -> ScanConfig:
    """Return the configuration for the chunks of states with one decay for a head."""
    if arch == 90 and key_dim <= 128:  # measured on an H200
        return ScanConfig(64, num_warps=8, num_stages=2)
    return chunks_config(arch, key_dim)


def chunks_config(arch: int, key_dim: int) -> ScanConfig:
    """Return the configuration of a kernel that goes through the chunks of a sequence.

    A state has `key_dim` numbers for each value channel, in registers.
    """
    warps = 4 if arch < 100 and key_dim <= 128 else 8
    small = arch < 90 or (arch < 100 and key_dim > 128)
    return ScanConfig(16 if small else 32, num_warps=warps, num_stages=2)


def channel_scan_config(channels: int, state_dim: int) -> ScanConfig:
    """Return the configuration for channels with `state_dim` numbers each, row by row."""
    values = 64
    while values > 32 and values // 2 >= channels:
        values //= 2
    return ScanConfig(values, num_warps=4 if state_dim > 1 else 2, num_stages=4)
