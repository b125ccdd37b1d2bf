"""What the attention kernels share: addresses of cached tokens, scores, the running softmax.

The softmax is online (Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023, section 3.1) and
in powers of 2, which the hardware has; `log2(e)` is folded into the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The running maximum before any key: finite, so that a row that sees no key of a tile, all of
# whose scores are minus infinity, gets weights of 0 and not of NaN.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _load_block_ids(table_ptr, tokens, end, BLOCK_SIZE: tl.constexpr):
    """Block of each token [TILE] int64; of the last one for tokens from `end` on."""
    # Block ids times their stride pass 2**31, so they widen as soon as they are loaded.
    return tl.load(table_ptr + tl.minimum(tokens, end - 1) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def _cache_offsets(
    blocks, tokens, kv_head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr
):
    """Where each token's key begins in [num_blocks, 2, KV_HEADS, BLOCK_SIZE, DIM]."""
    block_stride: tl.constexpr = 2 * KV_HEADS * BLOCK_SIZE * DIM
    return blocks * block_stride + (kv_head * BLOCK_SIZE + tokens % BLOCK_SIZE) * DIM


@triton.jit
def _load_keys(cache_ptr, offsets, dims, visible, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Keys as columns [DIM padded, TILE]."""
    pointers = cache_ptr + offsets[None, :] + dims[:, None]
    if MASKED:
        return tl.load(pointers, mask=visible[None, :] & (dims < DIM)[:, None], other=0.0)
    if dims.shape[0] != DIM:
        return tl.load(pointers, mask=(dims < DIM)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_values(cache_ptr, offsets, dims, visible, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Values as rows [TILE, DIM padded]; 0 where no key is, since a weight of 0 cannot undo NaN."""
    pointers = cache_ptr + offsets[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=visible[:, None] & (dims < DIM)[None, :], other=0.0)
    if dims.shape[0] != DIM:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _score(q, k, scale, softcap, slopes, distance):
    """Scores [rows, TILE] times log2(e).

    `scale` holds that factor unless there is a `softcap`; `distance` is from query to key, 0 or
    below. `softcap` and `slopes` may be None.
    """
    s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if softcap is not None:
        # One exponential: it may overflow to infinity and the quotient is still right.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 / softcap * LOG2E)) + 1.0))
        s *= LOG2E
    if slopes is not None:
        s += slopes[:, None] * (distance * LOG2E)
    return s


@triton.jit
def _accumulate(q, s, v, highest, total, acc):
    """Add a tile's values [TILE, DIM], under its scores `s`, to the running softmax."""
    now = tl.maximum(highest, tl.max(s, 1))
    weights = tl.exp2(s - now[:, None])
    shrink = tl.exp2(highest - now)
    total = total * shrink + tl.sum(weights, 1)
    # A quantized value is exact in the queries' type; its scale waits until the end.
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return now, total, acc


@triton.jit
def attend_tiles(
    q,
    cache_ptr,
    table_ptr,
    kv_head,
    first,
    last,
    num_keys,
    position,
    scale,
    softcap,
    slopes,
    highest,
    total,
    acc,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Let the rows of `q` [ROWS, DIM padded] see keys from `first`, a multiple of TILE, to `last`.

    Row r sees keys up to `position[r]`, its own position, and before `num_keys`; without MASKED
    the caller knows that it sees all of them. Returns the softmax's state: maximum, sum, output.
    """
    dims = tl.arange(0, acc.shape[1])
    offset = tl.arange(0, TILE)
    values_ptr = cache_ptr + KV_HEADS * BLOCK_SIZE * DIM
    # A tile ahead, so that the loads of keys and values can be pipelined.
    blocks = _load_block_ids(table_ptr, first + offset, num_keys, BLOCK_SIZE)
    for start in range(first, last, TILE):
        keys = start + offset
        at = _cache_offsets(blocks, keys, kv_head, KV_HEADS, BLOCK_SIZE, DIM)
        visible = keys < num_keys
        k = _load_keys(cache_ptr, at, dims, visible, DIM, MASKED)
        v = _load_values(values_ptr, at, dims, visible, DIM, MASKED)
        blocks = _load_block_ids(table_ptr, keys + TILE, num_keys, BLOCK_SIZE)
        distance = keys[None, :] - position[:, None]
        s = _score(q, k, scale, softcap, slopes, distance)
        if MASKED:
            seen = distance <= 0
            if WINDOW is not None:
                seen = seen & (distance > -WINDOW)
            s = tl.where(seen, s, float("-inf"))
        highest, total, acc = _accumulate(q, s, v, highest, total, acc)
    return highest, total, acc
