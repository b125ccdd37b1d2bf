"""Paged latent attention on the CPU in tiles, compiled by numba.

A tile has some of the rows of a sequence; a row is one query with one head. All rows of a tile read
the same numbers: a chunk of the sequence's latent vectors and rotary keys, which is brought into
float32 once. Chunks start at fixed positions, and each sum is computed in order, so that a token's
result does not depend on how its prompt was split or batched.

A block of the pool holds each number of its tokens next to each other. So the chunk is the second
factor of the scores, queries times keys, as it is, and the first factor of the sums, which are
transposed: values times weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from paged_backend.platforms.cpu.kv_formats import BFLOAT16, FLOAT32, StoredNumbers
from paged_backend.platforms.cpu.math import exp2
from paged_backend.platforms.cpu.softmax import LOWEST, weigh
from paged_backend.platforms.cpu.threads import (
    array_at,
    claim,
    claim_rows,
    device_function,
    device_variant,
    float_of,
    floats,
    inlined,
    ints,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES, Float32, make_multiply

_CHUNK = 128  # keys between two updates of the running softmax
_ROWS = LANES  # rows of a tile
_NUM_ARGUMENTS = 20


class LatentStep(NamedTuple):
    """The arguments of a kernel as arrays."""

    q: Any  # [num_tokens, num_heads, row_size]
    rows: Any  # [num_tokens, row_size]
    cos_sin_cache: Any  # [max_positions, rotary_dim]
    starts: Any  # [num_seqs + 1]
    seq_lens: Any  # [num_seqs]
    table: Any  # [num_seqs, table_width]
    slots: Any  # [num_tokens]
    pool: Any  # [num_blocks, row_size, block_size]
    out: Any  # [num_tokens, num_heads, rank]
    scale: Any


class _Scratch(NamedTuple):
    """The memory of a thread for its present tile."""

    queries: Any  # [_ROWS, row_size], rotated and scaled
    chunk: Any  # [row_size, _CHUNK] numbers of the keys
    scores: Any  # [_ROWS, _CHUNK], then the weights made of them
    weights: Any  # [_CHUNK, _ROWS] the same, transposed
    sums: Any  # [rank, _ROWS] of weighted latent vectors
    maxima: Any  # [_ROWS] highest score so far
    totals: Any  # [_ROWS] sum of the weights so far


@device_function
def _unpack(arguments: Any, number: Any) -> LatentStep:
    (
        _,
        q,
        rows,
        cos_sin_cache,
        starts,
        seq_lens,
        table,
        slots,
        pool,
        out,
        num_tokens,
        max_positions,
        num_seqs,
        table_width,
        num_blocks,
        heads,
        rank,
        rotary_dim,
        block_size,
        scale_bits,
    ) = numba.carray(arguments, _NUM_ARGUMENTS)
    row_size = rank + rotary_dim
    return LatentStep(
        floats(q, (num_tokens, heads, row_size)),
        floats(rows, (num_tokens, row_size)),
        floats(cos_sin_cache, (max_positions, rotary_dim)),
        ints(starts, (num_seqs + 1,)),
        ints(seq_lens, (num_seqs,)),
        ints(table, (num_seqs, table_width)),
        longs(slots, (num_tokens,)),
        array_at(pool, (num_blocks, row_size, block_size), number),
        floats(out, (num_tokens, heads, rank)),
        float_of(scale_bits),
    )


@device_function
def _rotate(row: Any, angles: Any) -> None:
    """Turn the last numbers of a row in place, as many as there are cosines and sines."""
    half = len(angles) // 2
    first, second = row[len(row) - 2 * half :], row[len(row) - half :]
    for i in range(half):
        cos, sin, x, y = angles[i], angles[half + i], first[i], second[i]
        first[i] = x * cos - y * sin
        second[i] = y * cos + x * sin


def _make_write(stored: StoredNumbers) -> Any:
    """Return the device function that turns rows, and writes them to their slots."""
    number, convert = stored.number, stored.convert

    @inlined
    def write(arguments: Any) -> None:
        step = _unpack(arguments, number)
        block_size, one = step.pool.shape[2], np.float32(1.0)
        # Consecutive tokens share cache lines, which two threads should not write.
        start, end = claim_rows(arguments, len(step.slots))
        seq = 0
        while start < end:
            for token in range(start, end):
                while step.starts[seq + 1] <= token:
                    seq += 1
                slot = step.slots[token]
                if slot >= 0:
                    position = step.seq_lens[seq] - step.starts[seq + 1] + token
                    _rotate(step.rows[token], step.cos_sin_cache[position])
                    numbers, offset = step.pool[slot // block_size], slot % block_size
                    for i in range(len(numbers)):
                        numbers[i, offset] = convert(step.rows[token, i], one)
            start, end = claim_rows(arguments, len(step.slots))

    return write


@device_function
def _load_queries(step: LatentStep, scratch: _Scratch, seq: int, first: int, count: int) -> None:
    """Copy a tile's queries, rotated and scaled, and clear its state."""
    heads = step.q.shape[1]
    for row in range(count):
        token = step.starts[seq] + (first + row) // heads
        query = scratch.queries[row]
        query[:] = step.q[token, (first + row) % heads]
        _rotate(query, step.cos_sin_cache[step.seq_lens[seq] - step.starts[seq + 1] + token])
        for i in range(len(query)):
            query[i] *= step.scale
    scratch.sums[:] = 0.0
    scratch.weights[:] = 0.0
    scratch.maxima[:] = LOWEST
    scratch.totals[:] = 0.0


@device_function
def _weigh_row(scratch: _Scratch, row: int, visible: int, num_keys: int) -> None:
    """Turn a row's scores into weights, and make its sums relative to the new maximum."""
    scores, before = np.int64(scratch.scores.ctypes.data) + row * _CHUNK * 4, scratch.maxima[row]
    scratch.maxima[row], scratch.totals[row] = weigh(
        *(scores, np.int64(scratch.sums.ctypes.data), 0),
        (before, scratch.totals[row]),
        (0, visible, num_keys),
    )
    for key in range(num_keys):
        scratch.weights[key, row] = scratch.scores[row, key]
    shrink = exp2(before - scratch.maxima[row])
    if shrink != 1:
        for i in range(len(scratch.sums)):
            scratch.sums[i, row] *= shrink


def _make_attend(stored: StoredNumbers, load: Any) -> Any:
    """Return the device function that attends one tile after the other.

    Args:
        stored: the format of the pool.
        load: a device function that returns the float32 of a stored number.
    """
    number, multiply = stored.number, make_multiply(Float32())

    @device_variant(stored.name)
    def load_chunk(step: LatentStep, scratch: _Scratch, seq: int, base: int, num_keys: int) -> None:
        """Bring the numbers of some keys into float32; those of other keys become 0."""
        block_size = step.pool.shape[2]
        for offset in range(0, num_keys, block_size):
            block = step.pool[step.table[seq, (base + offset) // block_size]]
            count = min(block_size, num_keys - offset)
            for i in range(len(block)):
                numbers, chunk = block[i], scratch.chunk[i, offset:]
                for key in range(count):
                    chunk[key] = load(numbers[key])
        for i in range(step.pool.shape[1]):
            scratch.chunk[i, num_keys:] = 0.0

    @device_variant(stored.name)
    def attend_tile(step: LatentStep, scratch: _Scratch, seq: int, first: int, count: int) -> None:
        """Attend the rows of a sequence from the number `first` on."""
        heads, row_size = step.q.shape[1], step.q.shape[2]
        rank = step.out.shape[2]
        queries, chunk = np.int64(scratch.queries.ctypes.data), np.int64(scratch.chunk.ctypes.data)
        scores, weights = np.int64(scratch.scores.ctypes.data), scratch.weights.ctypes.data
        sums = np.int64(scratch.sums.ctypes.data)
        before = step.seq_lens[seq] - (step.starts[seq + 1] - step.starts[seq])
        end = before + (first + count - 1) // heads + 1
        _load_queries(step, scratch, seq, first, count)
        for base in range(0, end, _CHUNK):
            num_keys = min(_CHUNK, end - base)
            load_chunk(step, scratch, seq, base, num_keys)
            multiply(
                *(count, _CHUNK, queries, row_size, chunk, _CHUNK, LANES),
                *(scores, _CHUNK, row_size, np.int64(0), np.int64(0)),
            )
            for row in range(count):
                here = before + (first + row) // heads - base
                _weigh_row(scratch, row, max(0, min(here + 1, num_keys)), num_keys)
            multiply(
                *(rank, _ROWS, chunk, _CHUNK, np.int64(weights), _ROWS, LANES),
                *(sums, _ROWS, num_keys, sums, np.int64(_ROWS)),
            )
        for row in range(count):
            token, head = step.starts[seq] + (first + row) // heads, (first + row) % heads
            inverse = np.float32(1.0) / scratch.totals[row]
            for i in range(rank):
                step.out[token, head, i] = scratch.sums[i, row] * inverse

    @inlined
    def attend(arguments: Any) -> None:
        step = _unpack(arguments, number)
        heads, row_size = step.q.shape[1], step.q.shape[2]
        scratch = _Scratch(
            np.empty((_ROWS, row_size), np.float32),
            np.empty((row_size, _CHUNK), np.float32),
            np.empty((_ROWS, _CHUNK), np.float32),
            np.empty((_CHUNK, _ROWS), np.float32),
            np.empty((step.out.shape[2], _ROWS), np.float32),
            np.empty(_ROWS, np.float32),
            np.empty(_ROWS, np.float32),
        )
        claimed = claim(arguments)
        tile = 0
        for seq in range(len(step.seq_lens)):
            rows = (step.starts[seq + 1] - step.starts[seq]) * heads
            for first in range(0, rows, _ROWS):
                if tile == claimed:
                    attend_tile(step, scratch, seq, first, min(_ROWS, rows - first))
                    claimed = claim(arguments)
                tile += 1

    return attend


@device_function
def _from_float32(x: Any) -> Any:
    return x


@device_function
def _from_bfloat16(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


_write_f32, _attend_f32 = _make_write(FLOAT32), _make_attend(FLOAT32, _from_float32)
_write_bf16, _attend_bf16 = _make_write(BFLOAT16), _make_attend(BFLOAT16, _from_bfloat16)


# numba caches compiled functions on disk only if they are global.
def write_float32(arguments: Any) -> None:
    """Turn and write the rows of a step to a float32 pool."""
    _write_f32(arguments)


def attend_float32(arguments: Any) -> None:
    """Attend to a float32 pool."""
    _attend_f32(arguments)


def write_bfloat16(arguments: Any) -> None:
    """Turn and write the rows of a step to a bf16 pool."""
    _write_bf16(arguments)


def attend_bfloat16(arguments: Any) -> None:
    """Attend to a bf16 pool."""
    _attend_bf16(arguments)
