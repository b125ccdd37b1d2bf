"""Rotary embedding of latent attention, and the write of rows to the cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check_tensor
from paged_kernels.latent_attention import check_cache

_HEADS = 16  # heads of a program


@triton.jit
def _latent_rope_cache_kernel(
    q_ptr,
    rows_ptr,
    positions_ptr,
    cos_sin_cache_ptr,
    cache_ptr,
    slots_ptr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    HALF: tl.constexpr,  # half of a rotary key
    HALF_PADDED: tl.constexpr,
    PART: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: some heads of a token; the first one also writes the token's row."""
    wait_for_launch_before(DEPENDENT)
    ROW: tl.constexpr = RANK + 2 * HALF
    BLOCKS: tl.constexpr = (HEADS + PART - 1) // PART
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    columns = tl.arange(0, HALF_PADDED)
    inside = columns < HALF
    angles = cos_sin_cache_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + columns
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + HALF, mask=inside, other=0.0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    head = block * PART + tl.arange(0, PART)
    mask = (head < HEADS)[:, None] & inside[None, :]
    places = q_ptr + (token * HEADS + head)[:, None] * ROW + RANK + columns[None, :]
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(places + HALF, (second * cos + first * sin).to(dtype), mask=mask)

    slot = tl.load(slots_ptr + token)
    if block == 0 and slot >= 0:
        dims = tl.arange(0, RANK_PADDED)
        source = rows_ptr + token * ROW
        target = cache_ptr + slot * ROW
        latent = tl.load(source + dims, mask=dims < RANK, other=0.0)
        tl.store(target + dims, latent, mask=dims < RANK)
        row_first = tl.load(source + RANK + columns, mask=inside, other=0.0).to(tl.float32)
        row_second = tl.load(source + RANK + HALF + columns, mask=inside, other=0.0).to(tl.float32)
        place = target + RANK + columns
        tl.store(place, (row_first * cos - row_second * sin).to(dtype), mask=inside)
        tl.store(place + HALF, (row_second * cos + row_first * sin).to(dtype), mask=inside)


def latent_rope_cache(
    q: Tensor,
    rows: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Rotate the last numbers of the queries in place; write rows, rotated, to the cache.

    Everything is computed in float32 and rounded once, when it is stored. The halves (x, y) of the
    rotary part become (x cos - y sin, y cos + x sin). `rows` is not changed. Rows must have
    different slots.

    Args:
        q: [tokens, num_heads, row_size] bfloat16, float16 or float32.
        rows: [tokens, row_size] in the dtype of `q`: the latent vector, then the rotary key.
        positions: [tokens] int32, row indices into `cos_sin_cache`.
        cos_sin_cache: [max_positions, rotary_dim] float32: for each position rotary_dim / 2
            cosines, then as many sines.
        cache: [num_blocks, block_size, row_size] of one layer, in the dtype of `q`.
        slot_mapping: [tokens] int64, block * block_size + offset. For a token with a negative slot
            nothing is written to the cache, but its queries are still rotated.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("q", q, (None, None, None), MODEL_DTYPES, like=q)
    device = device_of("q", q)
    num_tokens, num_heads, row_size = q.shape
    check_tensor("cos_sin_cache", cos_sin_cache, (None, None), torch.float32, like=q)
    rotary = cos_sin_cache.shape[1]
    check_cache(q, cache, row_size, row_size - rotary)
    check_tensor("rows", rows, (num_tokens, row_size), q.dtype, like=q)
    check_tensor("positions", positions, (num_tokens,), torch.int32, like=q)
    check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, like=q)
    if not num_tokens:
        return
    part = min(_HEADS, triton.next_power_of_2(num_heads))
    _latent_rope_cache_kernel[(num_tokens * triton.cdiv(num_heads, part),)](
        q,
        rows,
        positions,
        cos_sin_cache,
        cache,
        slot_mapping,
        HEADS=num_heads,
        RANK=row_size - rotary,
        RANK_PADDED=triton.next_power_of_2(row_size - rotary),
        HALF=rotary // 2,
        HALF_PADDED=triton.next_power_of_2(rotary // 2),
        PART=part,
        num_warps=4,
        **dependent_launch(device),
    )
