"""Fused norm and rotary embedding of queries and keys, and write of keys and values to the cache.

The rotary embedding uses the two-halves layout of GPT-NeoX and the Llama of transformers: Su et
al., "RoFormer" (2021), section 3.4.2. The norm of the heads: Qwen3 (2025), section 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._quantization import divided, scales_of, storable
from paged_kernels.attention_params import MAX_HEAD_DIM, check_scales
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES, QUANTIZED_DTYPES, check_float8
from paged_kernels.errors import check, check_blocks, check_tensor

_ELEMENTS_PER_WARP = 512  # elements of queries; 16 per thread


@triton.jit
def _load_halves(heads_ptr, starts, columns, mask, HALF: tl.constexpr):
    """Load the first and second halves, in float32, of the heads that start at `starts`."""
    first = tl.load(heads_ptr + starts + columns, mask=mask, other=0.0)
    second = tl.load(heads_ptr + starts + HALF + columns, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _normed(first, second, weight_ptr, eps, columns, inside, HALF: tl.constexpr):
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        weight, weight_second = _load_halves(weight_ptr, 0, columns, inside, HALF)
        first = first * scale * weight
        second = second * scale * weight_second
    return first, second


@triton.jit
def _rotated(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _number(x):
    """Replace NaN, which int8 cannot store, by 0."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def _store_head(ptrs, first, second, own_scale_ptr, scale_ptr, head, inside, HALF: tl.constexpr):
    """Store a head: with a scale for this token, with the static one at `head`, or as it is."""
    dtype: tl.constexpr = ptrs.dtype.element_ty
    if own_scale_ptr is not None:
        scale = scales_of(tl.max(tl.maximum(tl.abs(first), tl.abs(second))), dtype)
        tl.store(own_scale_ptr, scale)
        first = storable(_number(divided(first, scale)), dtype)
        second = storable(_number(divided(second, scale)), dtype)
    elif scale_ptr is not None:
        scale = tl.load(scale_ptr + head)
        first = storable(first / scale, dtype)
        second = storable(second / scale, dtype)
    tl.store(ptrs, first.to(dtype), mask=inside)
    tl.store(ptrs + HALF, second.to(dtype), mask=inside)


@triton.jit
def _fused_qk_norm_rope_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_scale_ptr,
    v_scale_ptr,
    kv_scales_ptr,
    norm_eps,
    QKV_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # elements in half a head
    HALF_PADDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one token, one KV head and its group of query heads.

    Halves are loaded as separate tiles, so that elements rotated together lie in one thread.
    """
    wait_for_launch_before(DEPENDENT)
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    columns = tl.arange(0, HALF_PADDED)[None, :]
    inside = columns < HALF
    group = tl.arange(0, GROUP_PADDED)[:, None]
    q_mask = (group < GROUP) & inside

    row_ptr = qkv_ptr + token.to(tl.int64) * QKV_STRIDE
    q_starts = (head * GROUP + group) * DIM
    first, second = _load_halves(row_ptr, q_starts, columns, q_mask, HALF)
    angles_ptr = cos_sin_cache_ptr + tl.load(positions_ptr + token).to(tl.int64) * DIM
    cos, sin = _load_halves(angles_ptr, 0, columns, inside, HALF)
    first, second = _normed(first, second, q_norm_ptr, norm_eps, columns, inside, HALF)
    first, second = _rotated(first, second, cos, sin)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    q_ptrs = row_ptr + q_starts + columns
    tl.store(q_ptrs, first.to(dtype), mask=q_mask)
    tl.store(q_ptrs + HALF, second.to(dtype), mask=q_mask)

    slot = -1
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + token)
    if slot >= 0:
        # A block holds the keys of all its heads, then their values.
        block = slot // BLOCK_SIZE
        key = head * BLOCK_SIZE + slot % BLOCK_SIZE
        value = key + KV_HEADS * BLOCK_SIZE
        k_ptrs = cache_ptr + block * BLOCK_STRIDE + key * DIM + columns
        v_ptrs = cache_ptr + block * BLOCK_STRIDE + value * DIM + columns
        own_k_scale_ptr, own_v_scale_ptr = None, None
        if kv_scales_ptr is not None:
            scales_ptr = kv_scales_ptr + block * SCALES_STRIDE
            own_k_scale_ptr, own_v_scale_ptr = scales_ptr + key, scales_ptr + value

        k_start = (KV_HEADS * GROUP + head) * DIM
        k_first, k_second = _load_halves(row_ptr, k_start, columns, inside, HALF)
        k_first, k_second = _normed(k_first, k_second, k_norm_ptr, norm_eps, columns, inside, HALF)
        k_first, k_second = _rotated(k_first, k_second, cos, sin)
        _store_head(k_ptrs, k_first, k_second, own_k_scale_ptr, k_scale_ptr, head, inside, HALF)

        v_start = k_start + KV_HEADS * DIM
        v_first, v_second = _load_halves(row_ptr, v_start, columns, inside, HALF)
        _store_head(v_ptrs, v_first, v_second, own_v_scale_ptr, v_scale_ptr, head, inside, HALF)


def fused_qk_norm_rope_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor | None,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Rotate the queries in place; write the rotated keys and the values to the cache.

    Everything is computed in float32 and rounded once, when it is stored. The keys and
    values in `qkv` are not changed. Rows must have different slots.

    Args:
        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim] bfloat16, float16 or float32: query
            heads, then key heads, then value heads. Rows may be strided. Without a `slot_mapping`,
            query heads only.
        positions: [tokens] int32, row indices into `cos_sin_cache`.
        cos_sin_cache: [max_positions, head_dim] float32: for each position head_dim / 2 cosines,
            then head_dim / 2 sines. The halves (x, y) of a head become
            (x cos - y sin, y cos + x sin).
        kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], keys and values of one
            layer, in the dtype of `qkv`, or in float8_e4m3fn or int8 with scales.
        slot_mapping: [tokens] int64, block * block_size + offset. For a token with a negative
            slot nothing is written to the cache, but its queries are still rotated. None if
            nothing is written at all.
        num_heads: number of query heads, a multiple of num_kv_heads.
        q_norm: [head_dim], dtype of `qkv` or float32: before rotation each query head is divided by
            sqrt(mean of its squares + norm_eps) and multiplied by this.
        k_norm: the same for the keys.
        k_scale: [num_kv_heads] float32: the cache stores key / scale, rounded to nearest with ties
            to even, clamped to +-448 (float8_e4m3fn) or +-127 (int8). Required for these two
            dtypes without `kv_scales`, not allowed for others.
        v_scale: the same for the values.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, filled for the written slots
            with a scale for each token and head instead: the largest absolute value of the head's
            elements, divided by 448 or 127, or 1 if that is 0. So what is stored for a token
            depends on that token alone. With non-finite elements the numbers mean nothing.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout, scales are missing
            or not allowed, or the device has no float8_e4m3fn (compute capability below 8.9).
    """
    check_tensor("qkv", qkv, (None, None), MODEL_DTYPES, like=qkv, contiguous=False)
    device = device_of("qkv", qkv)
    _check_cache(qkv, kv_cache, num_heads, device.arch, writes=slot_mapping is not None)
    num_tokens = len(qkv)
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    check_tensor("positions", positions, (num_tokens,), torch.int32, like=qkv)
    check_tensor("cos_sin_cache", cos_sin_cache, (None, head_dim), torch.float32, like=qkv)
    if slot_mapping is not None:
        check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, like=qkv)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, (head_dim,), (qkv.dtype, torch.float32), like=qkv)
    check_scales(kv_cache, k_scale, v_scale, kv_scales)
    if kv_cache.dtype in QUANTIZED_DTYPES and kv_scales is None:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check(scale is not None, name, f"is needed for a cache in {str(kv_cache.dtype)[6:]}")

    group = num_heads // num_kv_heads
    group_padded = triton.next_power_of_2(group)
    half_padded = triton.next_power_of_2(head_dim // 2)
    warps = 2 * group_padded * half_padded // _ELEMENTS_PER_WARP
    _fused_qk_norm_rope_cache_kernel[(num_tokens * num_kv_heads,)](
        qkv,
        positions,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        q_norm,
        k_norm,
        k_scale,
        v_scale,
        kv_scales,
        norm_eps,
        QKV_STRIDE=qkv.stride(0),
        BLOCK_STRIDE=kv_cache.stride(0),
        SCALES_STRIDE=None if kv_scales is None else kv_scales.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=group_padded,
        BLOCK_SIZE=block_size,
        HALF=head_dim // 2,
        HALF_PADDED=half_padded,
        num_warps=min(max(warps, 1), 8),
        **dependent_launch(device),
    )


def _check_cache(qkv: Tensor, kv_cache: Tensor, num_heads: int, arch: int, *, writes: bool) -> None:
    dtypes = (qkv.dtype, *QUANTIZED_DTYPES)
    check_blocks("kv_cache", kv_cache, (None, 2, None, None, None), dtypes, like=qkv)
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    whole = head_dim % 16 == 0 and 16 <= head_dim <= MAX_HEAD_DIM
    sizes = f"16, 32, ... {MAX_HEAD_DIM}"
    check(whole, "kv_cache", f"must have heads of {sizes} elements, got {head_dim}")
    divides = num_kv_heads > 0 and num_heads > 0 and num_heads % num_kv_heads == 0
    check(divides, "num_heads", f"must be a multiple of {num_kv_heads}, got {num_heads}")
    width = (num_heads + 2 * num_kv_heads * writes) * head_dim
    check(qkv.shape[1] == width, "qkv", f"must have rows of {width}, got {qkv.shape[1]}")
    check_float8("kv_cache", kv_cache.dtype, arch)
