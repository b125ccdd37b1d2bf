"""Paged attention with vector instructions: float32 arithmetic, any format of the pool."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from paged_backend.platforms.cpu.attention_tiles import (
    Products,
    Scratch,
    Step,
    make_attend,
    make_write,
)
from paged_backend.platforms.cpu.kv_formats import BFLOAT16, FLOAT8, FLOAT32, INT8, StoredNumbers
from paged_backend.platforms.cpu.softmax import weigh
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    device_function,
    device_variant,
    inlined,
)
from paged_backend.platforms.cpu.tiles import LANES, make_multiply

_ROWS = 24  # two tiles of registers


def _make_products(stored: StoredNumbers) -> Products:
    """Return the products with float32 queries and weights."""
    multiply, has_scales = make_multiply(stored.arithmetic), stored.largest is not None
    size, factor = np.dtype(stored.number).itemsize, np.float32(stored.factor)

    @device_variant(stored.name)
    def scale_scores(
        step: Step, scratch: Scratch, rows: int, place: Any, offset: int, num_keys: int
    ) -> None:
        """Multiply scores, or weights, by the scales of a block's keys, or values."""
        block, kind, head = place
        first = (kind * step.kv_heads + head) * step.block_size
        scales = step.scales[block if step.own_scales else 0, first:]
        for row in range(rows):
            scores = scratch.scores[row, offset:]
            for i in range(num_keys):
                scores[i] *= scales[i] * factor

    @device_variant(stored.name)
    def keys_of(step: Step, seq: int, head: int, position: int) -> Any:
        """Return the address of the keys of a head in the block that holds a position."""
        start = step.table[seq, position // step.block_size] * step.keys.shape[1]
        start += head * step.out.shape[2] * step.block_size
        return np.int64(step.keys.ctypes.data) + start * size

    @inlined
    def score(
        step: Step,
        scratch: Scratch,
        rows: int,
        seq: int,
        head: int,
        base: int,
        skipped: int,
        num_keys: int,
    ) -> None:
        """Multiply queries by the keys of a chunk, one or two blocks at a time."""
        head_dim, block_size = step.out.shape[2], step.block_size
        offset = skipped
        while offset < num_keys:
            keys = keys_of(step, seq, head, base + offset)
            count, next_panel = 1, LANES * size // 4
            # Two panels take fewer instructions; the next one may be anywhere.
            if block_size == LANES and offset + LANES < num_keys:
                count = 2
                next_panel = (keys_of(step, seq, head, base + offset + LANES) - keys) // 4
            multiply(
                *(rows, count * block_size, np.int64(scratch.queries.ctypes.data), head_dim),
                *(keys, block_size * size // 4, next_panel),
                np.int64(scratch.scores.ctypes.data) + offset * 4,
                *(scratch.scores.shape[1], head_dim, np.int64(0), np.int64(0)),
            )
            offset += count * block_size
        if has_scales:
            for offset in range(skipped, num_keys, block_size):
                block = step.table[seq, (base + offset) // block_size]
                scale_scores(step, scratch, rows, (block, 0, head), offset, block_size)

    @inlined
    def add_values(
        step: Step,
        scratch: Scratch,
        rows: int,
        seq: int,
        head: int,
        base: int,
        skipped: int,
        num_keys: int,
    ) -> None:
        """Add the values of a chunk, weighted, to the sums, block by block."""
        block_size, head_dim, stride = step.block_size, step.out.shape[2], step.values.shape[1]
        first = np.int64(step.values.ctypes.data) + head * head_dim * block_size * size
        for offset in range(skipped, num_keys, block_size):
            block = step.table[seq, (base + offset) // block_size]
            here = min(block_size, num_keys - offset)
            if has_scales:
                scale_scores(step, scratch, rows, (block, 1, head), offset, here)
            multiply(
                *(rows, head_dim, np.int64(scratch.scores.ctypes.data) + offset * 4),
                scratch.scores.shape[1],
                first + block * stride * size,
                *(head_dim * size // 4, LANES * size // 4),
                *(np.int64(scratch.sums.ctypes.data), head_dim, here),
                *(np.int64(scratch.sums.ctypes.data), head_dim),
            )

    return Products(_ROWS, weigh, _prepare, score, add_values)


@device_function
def _prepare(step: Step, scratch: Scratch, rows: int) -> None:
    """Leave the queries in float32."""


def _make_attend(stored: StoredNumbers) -> Any:
    return make_attend(stored, _make_products(stored))


_write_f32, _attend_f32 = make_write(FLOAT32), _make_attend(FLOAT32)
_write_bf16, _attend_bf16 = make_write(BFLOAT16), _make_attend(BFLOAT16)
_write_int8, _attend_int8 = make_write(INT8), _make_attend(INT8)
_write_fp8, _attend_fp8 = make_write(FLOAT8), _make_attend(FLOAT8)


# numba caches compiled functions on disk only if they are global.
def _write_float32(arguments: Any) -> None:
    _write_f32(arguments)


def _attend_float32(arguments: Any) -> None:
    _attend_f32(arguments)


def _write_bfloat16(arguments: Any) -> None:
    _write_bf16(arguments)


def _attend_bfloat16(arguments: Any) -> None:
    _attend_bf16(arguments)


def _write_int8s(arguments: Any) -> None:
    _write_int8(arguments)


def _attend_int8s(arguments: Any) -> None:
    _attend_int8(arguments)


def _write_float8(arguments: Any) -> None:
    _write_fp8(arguments)


def _attend_float8(arguments: Any) -> None:
    _attend_fp8(arguments)


_FUNCTIONS = {
    torch.float32: (_write_float32, _attend_float32),
    torch.bfloat16: (_write_bfloat16, _attend_bfloat16),
    torch.int8: (_write_int8s, _attend_int8s),
    torch.float8_e4m3fn: (_write_float8, _attend_float8),
}


@functools.cache
def vector_kernels(dtype: torch.dtype) -> tuple[ParallelKernel, ParallelKernel]:
    """Return the kernels for a dtype of the pool: one writes keys and values, the other attends.

    Both have the arguments of `attention_tiles.unpack` from the second one on.
    """
    write, attend = _FUNCTIONS[dtype]
    return ParallelKernel(write), ParallelKernel(attend)
