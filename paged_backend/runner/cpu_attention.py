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
from torch import Tensor

from paged_backend.models.cpu_threads import (
    ParallelKernel,
    claim,
    device_function,
    floats,
    ints,
    longs,
)
from paged_backend.models.cpu_tiles import multiply
from paged_backend.runner.attention import AttentionBackend, AttentionConfig, AttentionMetadata
from paged_backend.runner.kv_cache import KVCacheSpec

_TILE_ROWS = 24  # query rows (queries x heads of a group) that share one pass over the keys
_CHUNK = 128  # keys between two updates of the running softmax
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
        # The scale is applied to the queries; the softmax is one of powers of 2.
        self._query_factor = np.float64(config.scale * math.log2(math.e)).view(np.int64).item()

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Tensor,
        meta: AttentionMetadata,
        window: int | None = None,
    ) -> Tensor:
        qkv = qkv.contiguous()
        out = torch.empty(len(qkv), self._config.num_heads * self._spec.head_dim)
        num_seqs, table_width = meta.block_table.shape
        arguments = (
            qkv.data_ptr(),
            rotary.data_ptr(),
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
            meta.block_table.data_ptr(),
            meta.slot_mapping.data_ptr(),
            self._keys[layer].data_ptr(),
            self._values[layer].data_ptr(),
            out.data_ptr(),
            len(qkv),
            num_seqs,
            table_width,
            self._config.num_heads,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            self._spec.block_size,
            self._query_factor,
            _NO_WINDOW if window is None else window,
        )
        _write(*arguments)
        _attend(*arguments)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for pool in (self._keys, self._values):
                pool[:, target] = pool[:, source]


@device_function
def _write_tokens(arguments: Any) -> None:
    """Write the step's keys, rotated, and values to their slots, one token after the other."""


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
