"""Launch configurations of products with weights."""

from __future__ import annotations

from dataclasses import dataclass


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
