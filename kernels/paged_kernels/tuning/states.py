"""Launch configurations of layers that keep a state for each sequence."""

from __future__ import annotations

from dataclasses import dataclass


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
