"""Shared parts of the attention kernels: addresses of cached tokens, scores, running softmax.

The softmax is online (Milakov and Gimelshein, 2018; FlashAttention-2, Dao, 2023, section 3.1) and
uses powers of 2, which the hardware supports; `log2(e)` is folded into the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paged_kernels.windows import first_visible

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Initial value of the running maximum. It is finite so that a row that sees no key of a tile (all
# its scores are minus infinity) gets weights of 0 instead of NaN.
LOWEST = tl.constexpr(-1e30)
# With scales per token, weights are multiplied by the values' scales, which can be small, and by
# this number, so that the products do not become subnormal in float16. Stored values are at most
# 448, so the products cannot overflow either.
VALUE_FACTOR = tl.constexpr(64.0)


@triton.jit
def _load_block_ids(table_ptr, tokens, end, BLOCK_SIZE: tl.constexpr):
    """Return each token's block id [TILE] int64; tokens from `end` on get the last block id."""
    # Block ids times the block stride can exceed 2**31, so the ids are widened on load.
    return tl.load(table_ptr + tl.minimum(tokens, end - 1) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def _cache_offsets(
    blocks, tokens, kv_head, BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr
):
    """Return the offset of each token's key in [num_blocks, 2, heads, BLOCK_SIZE, DIM]."""
    return blocks * BLOCK_STRIDE + (kv_head * BLOCK_SIZE + tokens % BLOCK_SIZE) * DIM


@triton.jit
def _load_keys(cache_ptr, offsets, dims, visible, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load keys as columns [DIM padded, TILE]."""
    pointers = cache_ptr + offsets[None, :] + dims[:, None]
    if MASKED:
        return tl.load(pointers, mask=visible[None, :] & (dims < DIM)[:, None], other=0.0)
    if dims.shape[0] != DIM:
        return tl.load(pointers, mask=(dims < DIM)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_values(cache_ptr, offsets, dims, visible, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load values as rows [TILE, DIM padded]; 0 without a key, as weight 0 times NaN is NaN."""
    pointers = cache_ptr + offsets[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=visible[:, None] & (dims < DIM)[None, :], other=0.0)
    if dims.shape[0] != DIM:
        return tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_scales(scales_ptr, offsets, visible, MASKED: tl.constexpr):
    """Load the scale of each token's head [TILE]."""
    if MASKED:
        return tl.load(scales_ptr + offsets, mask=visible, other=0.0)
    return tl.load(scales_ptr + offsets)


@triton.jit
def _as_float16(q):
    """Return queries [rows, DIM] of bfloat16 as float16, and the power of 2 of each row [rows].

    Numbers below 2**-24 of a row's largest one become 0.
    """
    wide = q.to(tl.float32)
    bits = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True)
    power = tl.maximum(bits & 0x7F800000, 0x00800000).to(tl.float32, bitcast=True)
    return (wide / power[:, None]).to(tl.float16), power


@triton.jit
def _score(q, k, scale, softcap):
    """Return scores [rows, TILE] times log2(e).

    `scale`, a number or one for each row or key or both, includes that factor unless there is a
    `softcap`, which may be None.
    """
    s = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if softcap is not None:
        # tanh by one exponential: if it overflows to infinity, the quotient is still right.
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * (2.0 / softcap * LOG2E)) + 1.0))
        s *= LOG2E
    return s


@triton.jit
def _accumulate(q, s, v, v_scales, highest, total, acc):
    """Add a tile's values [TILE, DIM], under its scores `s`, to the running softmax.

    `v_scales`, a factor for each value [TILE], may be None.
    """
    now = tl.maximum(highest, tl.max(s, 1))
    weights = tl.exp2(s - now[:, None])
    shrink = tl.exp2(highest - now)
    total = total * shrink + tl.sum(weights, 1)
    if v_scales is not None:
        weights *= v_scales[None, :]
    # A quantized value is exact in the queries' dtype; a static scale is applied at the end.
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return now, total, acc


@triton.jit
def attend_tiles(
    q,
    cache_ptr,
    kv_scales_ptr,
    table_ptr,
    kv_head,
    first,
    last,
    first_key,
    num_keys,
    position,
    scale,
    softcap,
    highest,
    total,
    acc,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend from the rows of `q` [ROWS, DIM padded] to keys [first, last).

    `first` is a multiple of TILE. Row r sees keys up to its own position `position[r]` and before
    `num_keys`; without MASKED the caller guarantees that it sees all of them. With a WINDOW, no row
    sees a key before `first_key`, and none of these is read, because its block may have another
    owner. Returns the softmax state: maximum, sum, output. With `kv_scales_ptr`, which may be
    None, the output is VALUE_FACTOR times as large. BLOCK_STRIDE and SCALES_STRIDE are the numbers
    from one block of the cache, or of the scales, to the next.
    """
    if cache_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        # A device converts float8 to bfloat16 by float32, one number at a time, but two numbers at
        # once to float16, which is exact, too.
        q, power = _as_float16(q)
        scale = scale * power[:, None]
    dims = tl.arange(0, acc.shape[1])
    offset = tl.arange(0, TILE)
    values_ptr = cache_ptr + KV_HEADS * BLOCK_SIZE * DIM
    # Block ids are loaded a tile ahead, so that loads of keys and values can be pipelined.
    blocks = _load_block_ids(table_ptr, first + offset, num_keys, BLOCK_SIZE)
    for start in range(first, last, TILE):
        keys = start + offset
        at = _cache_offsets(blocks, keys, kv_head, BLOCK_STRIDE, BLOCK_SIZE, DIM)
        visible = keys < num_keys
        if WINDOW is not None:
            visible = visible & (keys >= first_key)
        k = _load_keys(cache_ptr, at, dims, visible, DIM, MASKED)
        v = _load_values(values_ptr, at, dims, visible, DIM, MASKED)
        factor = scale
        v_scales = None
        if kv_scales_ptr is not None:
            # The scales lie like a cache with heads of one element.
            at = _cache_offsets(blocks, keys, kv_head, SCALES_STRIDE, BLOCK_SIZE, 1)
            k_scales = _load_scales(kv_scales_ptr, at, visible, MASKED)
            v_scales_ptr = kv_scales_ptr + KV_HEADS * BLOCK_SIZE
            v_scales = _load_scales(v_scales_ptr, at, visible, MASKED) * VALUE_FACTOR
            factor = k_scales[None, :] * scale
        blocks = _load_block_ids(table_ptr, keys + TILE, num_keys, BLOCK_SIZE)
        s = _score(q, k, factor, softcap)
        if MASKED:
            distance = keys[None, :] - position[:, None]
            seen = distance <= 0
            if CHUNKED:
                seen = seen & (keys[None, :] >= first_visible(position, WINDOW, True)[:, None])
            elif WINDOW is not None:
                seen = seen & (distance > -WINDOW)
            s = tl.where(seen, s, float("-inf"))
        highest, total, acc = _accumulate(q, s, v, v_scales, highest, total, acc)
    return highest, total, acc
