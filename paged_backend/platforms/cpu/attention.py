"""Paged attention on the CPU, compiled by numba; it reads blocks in place.

The work is split into tiles: consecutive queries of one sequence with all query heads that share
one KV head. A tile reads its keys in chunks with a running softmax. Chunks start at fixed
positions, so that a token's result does not depend on how its prompt was split or batched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.cpu.layers import norm_heads
from paged_backend.platforms.cpu.math import exp2
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_function,
    floats,
    ints,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES, multiply

_TILE_ROWS = 24  # query rows (queries x heads of a group) that share one pass over the keys
_CHUNK = 128  # keys between two updates of the running softmax
_NO_WINDOW = 1 << 40
_NUM_ARGUMENTS = 21
_LOWEST = np.float32(-1e30)  # stands for minus infinity, which fast-math rules out


class CpuAttention(AttentionBackend):
    """Owns a pool of float32 keys [layers, blocks, kv_heads, head_dim, block_size] and values
    [layers, blocks, kv_heads, block_size, head_dim]; both are read along their last dimension.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int) -> None:
        self._spec = spec
        self._num_blocks = num_blocks
        outer = (spec.num_layers, num_blocks, spec.num_kv_heads)
        self._keys = torch.zeros(*outer, spec.head_dim, spec.block_size)
        self._values = torch.zeros(*outer, spec.block_size, spec.head_dim)
        self._layer_bytes = self._keys[0].nbytes

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        qkv = qkv.contiguous()
        if layer.qk_norm is not None:
            norm_heads(qkv, layer.qk_norm.heads, layer.qk_norm.eps)
        out = torch.empty(len(qkv), layer.num_heads * layer.head_dim)
        arguments = (
            qkv.data_ptr(),
            layer.cos_sin_cache.data_ptr(),
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
            meta.block_table.data_ptr(),
            meta.slot_mapping.data_ptr(),
            self._keys.data_ptr() + layer.index * self._layer_bytes,
            self._values.data_ptr() + layer.index * self._layer_bytes,
            out.data_ptr(),
            len(qkv),
            len(layer.cos_sin_cache),
            *meta.block_table.shape,
            self._num_blocks,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            self._spec.block_size,
            _scale_bits(layer.scale),
            _NO_WINDOW if layer.window is None else layer.window,
        )
        _write(*arguments)
        _attend(*arguments)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for pool in (self._keys, self._values):
                pool[:, target] = pool[:, source]


@functools.cache
def _scale_bits(scale: float) -> int:
    """Return the bits of the factor on scores for a softmax in powers of 2."""
    bits: int = np.float64(scale * math.log2(math.e)).view(np.int64).item()
    return bits


class _Step(NamedTuple):
    """The arguments of a kernel as arrays."""

    qkv: Any  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    cos_sin_cache: Any  # [max_positions, head_dim]
    starts: Any  # [num_seqs + 1]
    seq_lens: Any  # [num_seqs]
    table: Any  # [num_seqs, table_width]
    slots: Any  # [num_tokens]
    keys: Any  # [num_blocks, num_kv_heads, head_dim, block_size]
    values: Any  # [num_blocks, num_kv_heads, block_size, head_dim]
    out: Any  # [num_tokens, num_heads, head_dim]
    scale: Any
    window: Any


class _Scratch(NamedTuple):
    """The memory of a thread for its present tile; a row is one query with one head."""

    queries: Any  # [rows, head_dim], rotated and scaled
    scores: Any  # [rows, keys of a chunk], then the weights made of them
    sums: Any  # [rows, head_dim] of weighted values
    maxima: Any  # [rows] highest score so far
    totals: Any  # [rows] sum of the weights so far


@device_function
def _unpack(arguments: Any) -> _Step:
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
        out,
        num_tokens,
        max_positions,
        num_seqs,
        table_width,
        num_blocks,
        heads,
        kv_heads,
        head_dim,
        block_size,
        scale_bits,
        window,
    ) = numba.carray(arguments, _NUM_ARGUMENTS)
    return _Step(
        floats(qkv, (num_tokens, heads + 2 * kv_heads, head_dim)),
        floats(cos_sin_cache, (max_positions, head_dim)),
        ints(starts, (num_seqs + 1,)),
        ints(seq_lens, (num_seqs,)),
        ints(table, (num_seqs, table_width)),
        longs(slots, (num_tokens,)),
        floats(keys, (num_blocks, kv_heads, head_dim, block_size)),
        floats(values, (num_blocks, kv_heads, block_size, head_dim)),
        floats(out, (num_tokens, heads, head_dim)),
        np.float32(np.int64(scale_bits).view(np.float64)),
        window,
    )


def _write_tokens(arguments: Any) -> None:
    """Write keys, rotated, and values to their slots, one token after the other."""
    step = _unpack(arguments)
    token = claim(arguments)
    seq = 0
    while token < len(step.slots):
        while step.starts[seq + 1] <= token:
            seq += 1
        if step.slots[token] >= 0:
            position = step.seq_lens[seq] - step.starts[seq + 1] + token
            _write_token(step, token, position, step.slots[token])
        token = claim(arguments)


@device_function
def _write_token(step: _Step, token: int, position: int, slot: int) -> None:
    kv_heads, head_dim, block_size = step.keys.shape[1], step.keys.shape[2], step.keys.shape[3]
    block, offset = slot // block_size, slot % block_size
    half = head_dim // 2
    for head in range(kv_heads):
        key = step.out.shape[1] + head
        for i in range(half):
            cos, sin = step.cos_sin_cache[position, i], step.cos_sin_cache[position, half + i]
            x, y = step.qkv[token, key, i], step.qkv[token, key, half + i]
            step.keys[block, head, i, offset] = x * cos - y * sin
            step.keys[block, head, half + i, offset] = y * cos + x * sin
        for i in range(head_dim):
            step.values[block, head, offset, i] = step.qkv[token, key + kv_heads, i]


def _attend_tiles(arguments: Any) -> None:
    """Attend one tile after the other."""
    step = _unpack(arguments)
    kv_heads, head_dim = step.keys.shape[1], step.keys.shape[2]
    group = step.out.shape[1] // kv_heads
    tile_queries = max(1, _TILE_ROWS // group)
    rows = tile_queries * group
    scratch = _Scratch(
        np.empty((rows, head_dim), np.float32),
        np.empty((rows, max(_CHUNK, step.keys.shape[3])), np.float32),
        np.empty((rows, head_dim), np.float32),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
    )
    claimed = claim(arguments)
    tile = 0
    for seq in range(len(step.seq_lens)):
        for start in range(step.starts[seq], step.starts[seq + 1], tile_queries):
            count = min(tile_queries, step.starts[seq + 1] - start)
            for head in range(kv_heads):
                if tile == claimed:
                    _attend_tile(step, scratch, seq, start, count, head, group)
                    claimed = claim(arguments)
                tile += 1


@device_function
def _attend_tile(
    step: _Step, scratch: _Scratch, seq: int, start: int, count: int, head: int, group: int
) -> None:
    """Attend the queries from row `start` of the batch on, with the heads of one KV head."""
    rows, chunk = count * group, scratch.scores.shape[1]
    position = step.seq_lens[seq] - step.starts[seq + 1] + start
    end = position + count
    _load(step, scratch, start, rows, position, head, group)
    for base in range(max(0, position - step.window + 1) // chunk * chunk, end, chunk):
        num_keys = min(chunk, end - base)
        _score(step, scratch, rows, seq, head, base, num_keys)
        for row in range(rows):
            here = position + row // group - base
            first = min(max(0, here - step.window + 1), num_keys)
            _weigh(scratch, row, first, min(here + 1, num_keys), num_keys)
        _add_values(step, scratch, rows, seq, head, base, num_keys)
    _store(step, scratch, start, rows, head, group)


@device_function
def _load(
    step: _Step, scratch: _Scratch, start: int, rows: int, position: int, head: int, group: int
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
        scratch.maxima[row] = _LOWEST
        scratch.totals[row] = 0.0


@device_function
def _score(
    step: _Step, scratch: _Scratch, rows: int, seq: int, head: int, base: int, num_keys: int
) -> None:
    """Multiply queries by the keys of a chunk, block by block."""
    kv_heads, head_dim, block_size = step.keys.shape[1], step.keys.shape[2], step.keys.shape[3]
    for offset in range(0, num_keys, block_size):
        block = step.table[seq, (base + offset) // block_size] * kv_heads + head
        multiply(
            rows,
            block_size,
            np.int64(scratch.queries.ctypes.data),
            head_dim,
            np.int64(step.keys.ctypes.data) + block * head_dim * block_size * 4,
            block_size,
            LANES,
            np.int64(scratch.scores.ctypes.data) + offset * 4,
            scratch.scores.shape[1],
            head_dim,
            np.int64(0),
        )


@device_function
def _weigh(scratch: _Scratch, row: int, first: int, last: int, num_keys: int) -> None:
    """Turn a row's scores into weights relative to its maximum; 0 outside `first` to `last`."""
    old = scratch.maxima[row]
    highest = old
    for i in range(first, last):
        highest = max(highest, scratch.scores[row, i])
    total = np.float32(0.0)
    for i in range(first, last):
        weight = exp2(scratch.scores[row, i] - highest)
        scratch.scores[row, i] = weight
        total += weight
    for i in range(first):
        scratch.scores[row, i] = 0.0
    for i in range(max(first, last), num_keys):
        scratch.scores[row, i] = 0.0
    if highest > old:
        shrink = exp2(old - highest)
        total += scratch.totals[row] * shrink
        for i in range(scratch.sums.shape[1]):
            scratch.sums[row, i] *= shrink
    else:
        total += scratch.totals[row]
    scratch.maxima[row] = highest
    scratch.totals[row] = total


@device_function
def _add_values(
    step: _Step, scratch: _Scratch, rows: int, seq: int, head: int, base: int, num_keys: int
) -> None:
    """Add the values of a chunk, weighted, to the sums, block by block."""
    kv_heads, block_size, head_dim = (
        step.values.shape[1],
        step.values.shape[2],
        step.values.shape[3],
    )
    for offset in range(0, num_keys, block_size):
        block = step.table[seq, (base + offset) // block_size] * kv_heads + head
        multiply(
            rows,
            head_dim,
            np.int64(scratch.scores.ctypes.data) + offset * 4,
            scratch.scores.shape[1],
            np.int64(step.values.ctypes.data) + block * head_dim * block_size * 4,
            head_dim,
            LANES,
            np.int64(scratch.sums.ctypes.data),
            head_dim,
            min(block_size, num_keys - offset),
            np.int64(1),
        )


@device_function
def _store(step: _Step, scratch: _Scratch, start: int, rows: int, head: int, group: int) -> None:
    for row in range(rows):
        inverse = np.float32(1.0) / scratch.totals[row]
        query, member = start + row // group, head * group + row % group
        for i in range(scratch.sums.shape[1]):
            step.out[query, member, i] = scratch.sums[row, i] * inverse


_write = ParallelKernel(_write_tokens)
_attend = ParallelKernel(_attend_tiles)
