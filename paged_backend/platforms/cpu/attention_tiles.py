"""Paged attention on the CPU in tiles, compiled by numba; the kernels read blocks in place.

The work is split into tiles: consecutive queries of one sequence with all query heads that share
one KV head. A tile reads its keys in chunks with a running softmax. Chunks start at fixed
positions, so that a token's result does not depend on how its prompt was split or batched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np

from paged_backend.platforms.cpu.kv_formats import StoredNumbers, quotient, to_bfloat16
from paged_backend.platforms.cpu.math import exp2, maximum
from paged_backend.platforms.cpu.threads import (
    array_at,
    claim,
    claim_rows,
    device_function,
    device_variant,
    floats,
    inlined,
    ints,
    longs,
)

CHUNK = 256
"""Keys between two updates of the running softmax, if a block is not larger."""

_NUM_ARGUMENTS = 30
_ONE = np.float32(1.0)
_TWO_LOG2E = np.float32(2 * math.log2(math.e))


class Step(NamedTuple):
    """The arguments of a kernel as arrays."""

    qkv: Any  # [num_tokens, num_heads + 2 * num_kv_heads or num_heads, head_dim]
    cos_sin_cache: Any  # [max_positions, head_dim]
    starts: Any  # [num_seqs + 1]
    seq_lens: Any  # [num_seqs]
    table: Any  # [num_seqs, table_width]
    slots: Any  # [num_tokens]
    keys: Any  # [num_blocks, numbers], which begin with [num_kv_heads, head_dim * block_size]
    values: Any  # the same
    scales: Any  # [num_blocks or 1, numbers], which begin with [2, num_kv_heads, block_size]
    kv_heads: Any
    own_scales: Any  # 1 if each block has scales, else 0
    sinks: Any  # [num_heads]
    out: Any  # [num_tokens, num_heads, head_dim], float32 or bf16
    block_size: Any
    scale: Any
    softcap: Any  # 0 for none
    window: Any  # the most positions that a token sees
    chunked: Any  # 1 if they are those of its chunk, else the last ones
    rounds: Any  # 1 if `out` is in bf16, else 0


class Scratch(NamedTuple):
    """The memory of a thread for its present tile; a row is one query with one head."""

    queries: Any  # [rows, head_dim], rotated and scaled
    scores: Any  # [rows, keys of a chunk], then the weights made of them, which may be bf16
    sums: Any  # [rows, head_dim] of weighted values
    maxima: Any  # [rows] highest score so far
    totals: Any  # [rows] sum of the weights so far
    rounded_queries: Any  # [rows, head_dim] uint16; this and the rest serve products that need it
    last_values: Any  # [16 * head_dim] uint16
    addresses: Any  # [keys of a chunk] int64


@device_function
def unpack(arguments: Any, number: Any) -> Step:
    (
        _,
        qkv,
        cos_sin_cache,
        starts,
        seq_lens,
        table,
        slots,
        keys,
        values,
        scales,
        sinks,
        out,
        num_tokens,
        max_positions,
        num_seqs,
        table_width,
        num_blocks,
        block_numbers,
        block_scales,
        own_scales,
        row_heads,
        heads,
        kv_heads,
        head_dim,
        block_size,
        scale_bits,
        softcap_bits,
        window,
        chunked,
        rounds,
    ) = numba.carray(arguments, _NUM_ARGUMENTS)
    num_scales = num_blocks if own_scales else 1
    return Step(
        floats(qkv, (num_tokens, row_heads, head_dim)),
        floats(cos_sin_cache, (max_positions, head_dim)),
        ints(starts, (num_seqs + 1,)),
        ints(seq_lens, (num_seqs,)),
        ints(table, (num_seqs, table_width)),
        longs(slots, (num_tokens,)),
        array_at(keys, (num_blocks, block_numbers), number),
        array_at(values, (num_blocks, block_numbers), number),
        floats(scales, (num_scales, block_scales)),
        kv_heads,
        own_scales,
        floats(sinks, (heads,)),
        floats(out, (num_tokens, heads, head_dim)),
        block_size,
        np.float32(np.int64(scale_bits).view(np.float64)),
        np.float32(np.int64(softcap_bits).view(np.float64)),
        window,
        chunked,
        rounds,
    )


def make_write(stored: StoredNumbers) -> Any:
    """Return the device function that writes keys, rotated, and values to their slots."""
    number, convert, has_scales = stored.number, stored.convert, stored.largest is not None
    key_place, value_place = stored.key_place, stored.value_place
    largest = np.float32(stored.largest or 1.0)

    @device_variant(stored.name)
    def scale_of(step: Step, numbers: Any, place: Any) -> Any:
        """Return the scale of a head of a token, computed and stored if each one has its scale."""
        block, kind, head, offset = place
        if not has_scales:
            return _ONE
        index = (kind * step.kv_heads + head) * step.block_size + offset
        if step.own_scales == 0:
            return step.scales[0, index]
        highest = np.float32(0.0)
        for i in range(len(numbers)):
            highest = maximum(highest, abs(numbers[i]))
        scale = quotient(highest, largest) if highest > 0 else _ONE
        step.scales[block, index] = scale
        return scale

    @inlined
    def write_token(step: Step, key: Any, token: int, position: int, slot: int) -> None:
        kv_heads, head_dim, block_size = step.kv_heads, step.out.shape[2], step.block_size
        block, offset = slot // block_size, slot % block_size
        half = head_dim // 2
        for head in range(kv_heads):
            source = step.qkv[token, step.out.shape[1] + head]
            for i in range(half):
                cos, sin = step.cos_sin_cache[position, i], step.cos_sin_cache[position, half + i]
                x, y = source[i], source[half + i]
                key[i] = x * cos - y * sin
                key[half + i] = y * cos + x * sin
            scale = scale_of(step, key, (block, 0, head, offset))
            start = head * head_dim * block_size
            keys, values = step.keys[block, start:], step.values[block, start:]
            for i in range(head_dim):
                keys[key_place(i, offset, head_dim, block_size)] = convert(key[i], scale)
            value = step.qkv[token, step.out.shape[1] + kv_heads + head]
            scale = scale_of(step, value, (block, 1, head, offset))
            for i in range(head_dim):
                values[value_place(i, offset, head_dim, block_size)] = convert(value[i], scale)

    @inlined
    def write(arguments: Any) -> None:
        step = unpack(arguments, number)
        key = np.empty(step.out.shape[2], np.float32)
        # Keys of consecutive tokens share cache lines, which two threads should not write.
        start, end = claim_rows(arguments, len(step.slots))
        seq = 0
        while start < end:
            for token in range(start, end):
                while step.starts[seq + 1] <= token:
                    seq += 1
                if step.slots[token] >= 0:
                    position = step.seq_lens[seq] - step.starts[seq + 1] + token
                    write_token(step, key, token, position, step.slots[token])
            start, end = claim_rows(arguments, len(step.slots))

    return write


@device_function
def _load(
    step: Step, scratch: Scratch, start: int, rows: int, position: int, head: int, group: int
) -> None:
    """Gather a tile's queries, rotated and scaled, and clear its state."""
    half = scratch.queries.shape[1] // 2
    for row in range(rows):
        query, member = row // group, head * group + row % group
        for i in range(half):
            cos = step.cos_sin_cache[position + query, i] * step.scale
            sin = step.cos_sin_cache[position + query, half + i] * step.scale
            x = step.qkv[start + query, member, i]
            y = step.qkv[start + query, member, half + i]
            scratch.queries[row, i] = x * cos - y * sin
            scratch.queries[row, half + i] = y * cos + x * sin
        for i in range(2 * half):
            scratch.sums[row, i] = 0.0
        scratch.maxima[row] = step.sinks[member]
        scratch.totals[row] = 1.0


@device_function
def _first_visible(step: Step, position: int) -> Any:
    """Return the first position that a token sees."""
    if step.chunked != 0:
        return position // step.window * step.window
    return max(0, position - step.window + 1)


@device_function
def _cap(scratch: Scratch, rows: int, skipped: int, num_keys: int, softcap: Any) -> None:
    """Replace scores by softcap * tanh(score / softcap)."""
    for row in range(rows):
        for i in range(skipped, num_keys):
            score = scratch.scores[row, i]
            power = exp2(-abs(score) * (_TWO_LOG2E / softcap))
            capped = softcap * (_ONE - power) / (_ONE + power)
            scratch.scores[row, i] = capped if score >= 0 else -capped


@device_function
def _store(step: Step, scratch: Scratch, start: int, rows: int, head: int, group: int) -> None:
    rounded = array_at(np.int64(step.out.ctypes.data), step.out.shape, np.uint16)
    for row in range(rows):
        inverse, sums = _ONE / scratch.totals[row], scratch.sums[row]
        query, member = start + row // group, head * group + row % group
        if step.rounds:
            numbers = rounded[query, member]
            for i in range(len(sums)):
                numbers[i] = to_bfloat16(sums[i] * inverse, _ONE)
        else:
            out = step.out[query, member]
            for i in range(len(sums)):
                out[i] = sums[i] * inverse


@dataclass(frozen=True, slots=True)
class Products:
    """The two matrix products of attention, as device functions.

    Attributes:
        rows: query rows (queries times heads of a group) that share one pass over the keys.
        weigh: turns the scores of a row into weights; of the module `softmax`.
        prepare: (step, scratch, rows), called when the queries of a tile are loaded.
        score: (step, scratch, rows, seq, head, base, skipped, num_keys); multiplies queries by the
            keys from position `base` on. The first `skipped` keys, which are whole blocks, must not
            be read: they are out of every window, and their blocks may have other owners. Scores
            of these keys, and after `num_keys`, may be anything.
        add_values: the same arguments; adds the values, weighted by the scores, to the sums.
    """

    rows: int
    weigh: Callable[..., Any]
    prepare: Callable[..., Any]
    score: Callable[..., Any]
    add_values: Callable[..., Any]


def make_attend(stored: StoredNumbers, products: Products) -> Any:
    """Return the device function that attends one tile after the other."""
    number, most_rows, weigh = stored.number, products.rows, products.weigh
    prepare, score, add_values = products.prepare, products.score, products.add_values

    @inlined
    def attend_tile(
        step: Step, scratch: Scratch, seq: int, start: int, count: int, head: int, group: int
    ) -> None:
        """Attend the queries from row `start` of the batch on, with the heads of one KV head."""
        rows, chunk, head_dim = count * group, scratch.scores.shape[1], scratch.sums.shape[1]
        scores, sums = np.int64(scratch.scores.ctypes.data), np.int64(scratch.sums.ctypes.data)
        position = step.seq_lens[seq] - step.starts[seq + 1] + start
        end = position + count
        _load(step, scratch, start, rows, position, head, group)
        prepare(step, scratch, rows)
        begin = _first_visible(step, position)
        for base in range(begin // chunk * chunk, end, chunk):
            num_keys = min(chunk, end - base)
            skipped = max(0, begin - base) // step.block_size * step.block_size
            score(step, scratch, rows, seq, head, base, skipped, num_keys)
            if step.softcap > 0:
                _cap(scratch, rows, skipped, num_keys, step.softcap)
            for row in range(rows):
                here = position + row // group
                first = min(max(0, _first_visible(step, here) - base), num_keys)
                scratch.maxima[row], scratch.totals[row] = weigh(
                    *(scores + row * chunk * 4, sums + row * head_dim * 4, head_dim),
                    (scratch.maxima[row], scratch.totals[row]),
                    (first, min(here - base + 1, num_keys), num_keys),
                )
            add_values(step, scratch, rows, seq, head, base, skipped, num_keys)
        _store(step, scratch, start, rows, head, group)

    @inlined
    def attend(arguments: Any) -> None:
        step = unpack(arguments, number)
        kv_heads, head_dim = step.kv_heads, step.out.shape[2]
        group = step.out.shape[1] // kv_heads
        tile_queries = max(1, most_rows // group)
        rows = (max(most_rows, tile_queries * group) + 15) // 16 * 16
        chunk = max(CHUNK, step.block_size)
        scratch = Scratch(
            np.empty((rows, head_dim), np.float32),
            np.empty((rows, chunk), np.float32),
            np.empty((rows, head_dim), np.float32),
            np.empty(rows, np.float32),
            np.empty(rows, np.float32),
            np.empty((rows, head_dim), np.uint16),
            np.empty(16 * head_dim, np.uint16),
            np.empty(chunk, np.int64),
        )
        claimed = claim(arguments)
        tile = 0
        for seq in range(len(step.seq_lens)):
            for start in range(step.starts[seq], step.starts[seq + 1], tile_queries):
                count = min(tile_queries, step.starts[seq + 1] - start)
                for head in range(kv_heads):
                    if tile == claimed:
                        attend_tile(step, scratch, seq, start, count, head, group)
                        claimed = claim(arguments)
                    tile += 1

    return attend
