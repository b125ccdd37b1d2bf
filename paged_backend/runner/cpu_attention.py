"""Paged attention on the CPU: compiled by numba, walks the block tables where they lie.

Work is cut into tiles: some consecutive queries of one sequence with all query heads that share
one KV head. A tile goes over its keys in chunks with a running softmax. Chunks start at fixed
positions, so that a token's result does not depend on how its prompt was cut or batched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.models.cpu_tiles import (
    device_function,
    kernel,
    multiply,
    use_torch_threads,
)
from paged_backend.runner.attention import AttentionBackend, AttentionConfig, AttentionMetadata
from paged_backend.runner.kv_cache import KVCacheSpec

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_TILE_ROWS = 24  # query rows (queries x heads of a group) that share one pass over the keys
_CHUNK = 128  # keys between two updates of the running softmax
_READ_COST = 2  # of a tile's keys and values, in queries' worth of arithmetic
_NO_WINDOW = 1 << 40
_LOG2E = math.log2(math.e)
_LOWEST = np.float32(-1e30)  # stands for minus infinity, which fast-math rules out
# Taylor series of 2^x; on [-0.5, 0.5] the first term left out is 1.2e-7.
_C1, _C2, _C3, _C4, _C5, _C6 = (
    np.float32(math.log(2) ** power / math.factorial(power)) for power in range(1, 7)
)


class CpuAttention(AttentionBackend):
    """Pool of float32 keys [layers, blocks, kv_heads, head_dim, block_size] and values
    [layers, blocks, kv_heads, block_size, head_dim]: both are read along their last dimension.
    """

    def __init__(self, spec: KVCacheSpec, config: AttentionConfig, num_blocks: int) -> None:
        self._spec = spec
        self._config = config
        outer = (spec.num_layers, num_blocks, spec.num_kv_heads)
        self._keys = torch.zeros(*outer, spec.head_dim, spec.block_size)
        self._values = torch.zeros(*outer, spec.block_size, spec.head_dim)
        self._layer_keys = list(self._keys.numpy())
        self._layer_values = list(self._values.numpy())

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Tensor,
        meta: AttentionMetadata,
        window: int | None = None,
    ) -> Tensor:
        workers = use_torch_threads()
        out = torch.empty(len(qkv), self._config.num_heads * self._spec.head_dim)
        _write_and_attend(
            qkv.contiguous().numpy(),
            rotary.numpy(),
            meta.query_start_loc.numpy(),
            meta.seq_lens.numpy(),
            meta.block_table.numpy(),
            meta.slot_mapping.numpy(),
            self._layer_keys[layer],
            self._layer_values[layer],
            out.numpy(),
            self._config.scale,
            _NO_WINDOW if window is None else window,
            workers,
        )
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for pool in (self._keys, self._values):
                pool[:, target] = pool[:, source]

    def warm_up(self) -> None:
        """Attend one token that is written nowhere."""
        heads = self._config.num_heads + 2 * self._spec.num_kv_heads
        one = torch.ones(1, dtype=torch.int32)
        meta = AttentionMetadata(
            query_start_loc=torch.arange(2, dtype=torch.int32),
            seq_lens=one,
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=torch.full((1,), -1),
        )
        rotary = torch.zeros(1, self._spec.head_dim)
        self.attend(0, torch.zeros(1, heads * self._spec.head_dim), rotary, meta)


@kernel
def _write_and_attend(
    qkv: Floats,
    rotary: Floats,
    starts: Ints,
    seq_lens: Ints,
    table: Ints,
    slots: Longs,
    keys: Floats,
    values: Floats,
    out: Floats,
    scale: float,
    window: int,
    workers: int,
) -> None:
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group = out.shape[1] // head_dim // kv_heads
    tile_queries = max(1, _TILE_ROWS // group)
    for worker in numba.prange(workers):
        _write_share(np.int64(worker), workers, qkv, rotary, starts, seq_lens, slots, keys, values)
    total = _total_work(starts, seq_lens, tile_queries, kv_heads, window)
    for worker in numba.prange(workers):
        _walk_tiles(
            worker * total // workers,
            (worker + 1) * total // workers,
            tile_queries,
            qkv,
            rotary,
            starts,
            seq_lens,
            table,
            keys,
            values,
            out,
            scale,
            window,
        )


@device_function
def _write_share(
    worker: int,
    workers: int,
    qkv: Floats,
    rotary: Floats,
    starts: Ints,
    seq_lens: Ints,
    slots: Longs,
    keys: Floats,
    values: Floats,
) -> None:
    """Write a worker's share of the tokens to their slots, keys rotated."""
    kv_heads, head_dim, block_size = keys.shape[1], keys.shape[2], keys.shape[3]
    half = head_dim // 2
    num_tokens = len(slots)
    first = worker * num_tokens // workers
    last = (worker + 1) * num_tokens // workers
    seq = 0
    for token in range(first, last):
        while starts[seq + 1] <= token:
            seq += 1
        position = seq_lens[seq] - starts[seq + 1] + token
        slot = slots[token]
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(kv_heads):
            value = qkv.shape[1] - (kv_heads - head) * head_dim
            key = value - kv_heads * head_dim
            for i in range(half):
                cos, sin = rotary[position, i], rotary[position, half + i]
                x, y = qkv[token, key + i], qkv[token, key + half + i]
                keys[block, head, i, offset] = x * cos - y * sin
                keys[block, head, half + i, offset] = y * cos + x * sin
            for i in range(head_dim):
                values[block, head, offset, i] = qkv[token, value + i]


@device_function
def _walk_tiles(
    first_work: int,
    last_work: int,
    tile_queries: int,
    qkv: Floats,
    rotary: Floats,
    starts: Ints,
    seq_lens: Ints,
    table: Ints,
    keys: Floats,
    values: Floats,
    out: Floats,
    scale: float,
    window: int,
) -> None:
    """Compute the tiles that begin within a span of the batch's work."""
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group = out.shape[1] // head_dim // kv_heads
    rows = tile_queries * group
    queries = np.empty((rows, head_dim), np.float32)
    scores = np.empty((rows, max(_CHUNK, keys.shape[3])), np.float32)
    sums = np.empty((rows, head_dim), np.float32)
    maxima = np.empty(rows, np.float32)
    totals = np.empty(rows, np.float32)
    work = 0
    for seq in range(len(seq_lens)):
        for start in range(starts[seq], starts[seq + 1], tile_queries):
            count = min(tile_queries, starts[seq + 1] - start)
            position = seq_lens[seq] - starts[seq + 1] + start
            for head in range(kv_heads):
                if first_work <= work < last_work:
                    _load_queries(
                        qkv, rotary, start, count, position, head, group, scale, queries
                    )
                    _attend_tile(
                        position,
                        count * group,
                        group,
                        head,
                        seq,
                        table,
                        keys,
                        values,
                        window,
                        queries,
                        scores,
                        sums,
                        maxima,
                        totals,
                    )
                    _store(sums, totals, start, count, head, group, out)
                work += _work(position, count, window)


@device_function
def _work(position: int, count: int, window: int) -> int:
    """What a tile of `count` queries from `position` on costs, in any unit."""
    return min(position + count, window) * (count + _READ_COST)


@device_function
def _total_work(starts: Ints, seq_lens: Ints, tile_queries: int, kv_heads: int, window: int) -> int:
    total = 0
    for seq in range(len(seq_lens)):
        for start in range(starts[seq], starts[seq + 1], tile_queries):
            count = min(tile_queries, starts[seq + 1] - start)
            position = seq_lens[seq] - starts[seq + 1] + start
            total += kv_heads * _work(position, count, window)
    return total


@device_function
def _load_queries(
    qkv: Floats,
    rotary: Floats,
    start: int,
    count: int,
    position: int,
    head: int,
    group: int,
    scale: float,
    queries: Floats,
) -> None:
    """Gather a tile's queries, rotated and scaled so that the softmax is one of powers of 2."""
    head_dim = queries.shape[1]
    half = head_dim // 2
    factor = np.float32(scale * _LOG2E)
    for row in range(count * group):
        query, member = row // group, row % group
        column = (head * group + member) * head_dim
        for i in range(half):
            cos = rotary[position + query, i] * factor
            sin = rotary[position + query, half + i] * factor
            x, y = qkv[start + query, column + i], qkv[start + query, column + half + i]
            queries[row, i] = x * cos - y * sin
            queries[row, half + i] = y * cos + x * sin


@device_function
def _attend_tile(
    position: int,
    rows: int,
    group: int,
    head: int,
    seq: int,
    table: Ints,
    keys: Floats,
    values: Floats,
    window: int,
    queries: Floats,
    scores: Floats,
    sums: Floats,
    maxima: Floats,
    totals: Floats,
) -> None:
    """Leave in `sums` the weighted values of the tile's rows, in `totals` the weights' totals.

    `position` is that of the first query; row r belongs to query r // group.
    """
    head_dim, block_size = keys.shape[2], keys.shape[3]
    chunk = scores.shape[1]
    block_bytes = head_dim * block_size * 4
    for row in range(rows):
        maxima[row] = _LOWEST
        totals[row] = 0.0
        for i in range(head_dim):
            sums[row, i] = 0.0
    end = position + (rows + group - 1) // group
    for base in range(max(0, position - window + 1) // chunk * chunk, end, chunk):
        num_keys = min(chunk, end - base)
        for offset in range(0, num_keys, block_size):
            block = table[seq, (base + offset) // block_size] * keys.shape[1] + head
            multiply(
                rows,
                block_size,
                np.int64(queries.ctypes.data),
                head_dim,
                np.int64(keys.ctypes.data) + block * block_bytes,
                block_size,
                np.int64(scores.ctypes.data) + offset * 4,
                chunk,
                head_dim,
                np.int64(0),
            )
        for row in range(rows):
            here = position + row // group - base
            first = min(max(0, here - window + 1), num_keys)
            last = min(here + 1, num_keys)
            _softmax(row, first, last, num_keys, scores, sums, maxima, totals)
        for offset in range(0, num_keys, block_size):
            block = table[seq, (base + offset) // block_size] * keys.shape[1] + head
            multiply(
                rows,
                head_dim,
                np.int64(scores.ctypes.data) + offset * 4,
                chunk,
                np.int64(values.ctypes.data) + block * block_bytes,
                head_dim,
                np.int64(sums.ctypes.data),
                head_dim,
                min(block_size, num_keys - offset),
                np.int64(1),
            )


@device_function
def _softmax(
    row: int,
    first: int,
    last: int,
    num_keys: int,
    scores: Floats,
    sums: Floats,
    maxima: Floats,
    totals: Floats,
) -> None:
    """Turn a row's scores into weights relative to the running maximum; 0 outside first to last."""
    old = maxima[row]
    highest = old
    for i in range(first, last):
        highest = max(highest, scores[row, i])
    total = np.float32(0.0)
    for i in range(first, last):
        weight = _exp2(scores[row, i] - highest)
        scores[row, i] = weight
        total += weight
    for i in range(first):
        scores[row, i] = 0.0
    for i in range(max(first, last), num_keys):
        scores[row, i] = 0.0
    if highest > old:
        shrink = _exp2(old - highest)
        totals[row] *= shrink
        for i in range(sums.shape[1]):
            sums[row, i] *= shrink
        maxima[row] = highest
    totals[row] += total


@device_function
def _exp2(x: Any) -> Any:
    """2 to the power of a float32 that is at most 0, in arithmetic that vectorises."""
    x = max(x, np.float32(-126.0))
    whole = np.float32(math.floor(x + np.float32(0.5)))
    f = x - whole
    fraction = f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * (_C5 + f * _C6)))))
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return power + power * fraction


@device_function
def _store(
    sums: Floats, totals: Floats, start: int, count: int, head: int, group: int, out: Floats
) -> None:
    head_dim = sums.shape[1]
    for row in range(count * group):
        column = (head * group + row % group) * head_dim
        inverse = np.float32(1.0) / totals[row]
        for i in range(head_dim):
            out[start + row // group, column + i] = sums[row, i] * inverse
