"""Sums of products of keys and values that decay by a factor for each head, for chunks of rows.

Dao and Gu, "Transformers are SSMs" (2024), section 6. One launch computes the scores of all chunks;
another one goes through the chunks of each sequence with the state in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._chunks import (
    CHUNK,
    chunks_of,
    decays_around,
    decays_between,
    product,
    product_of_parts,
    store_parts,
)
from paged_kernels._rates import Rates, time_steps
from paged_kernels._states import find_tile, load_state, store_state
from paged_kernels.dependent_launch import wait_for_launch_before
from paged_kernels.device import Device
from paged_kernels.tuning.states import decayed_chunks_config


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_tokens"])
def _scores_kernel(
    q_ptr,
    k_ptr,
    rates_ptr,
    steps_ptr,
    bias_ptr,
    starts_ptr,
    seq_lens_ptr,
    scores_ptr,
    factors_ptr,
    lowest,
    highest,
    first_seq,
    num_seqs,
    num_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    STEPS_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: what the chunks' results need besides the state, for a chunk and a head."""
    wait_for_launch_before(DEPENDENT)
    head = tl.program_id(1)
    seq, chunk = find_tile(starts_ptr, tl.program_id(0), first_seq, num_seqs, CHUNK, 2)
    start, position, count = chunks_of(starts_ptr, seq_lens_ptr, seq)
    if chunk * CHUNK >= position % CHUNK + count:
        return
    row = start - position % CHUNK + chunk * CHUNK + tl.arange(0, CHUNK)
    exists = (row >= start) & (row < start + count)
    row = row.to(tl.int64)
    key = tl.arange(0, KEYS)
    mask = exists[:, None] & (key < KEY_DIM)[None, :]
    column = head // GROUP * KEY_DIM + key
    k = tl.load(k_ptr + row[:, None] * K_STRIDE + column[None, :], mask=mask, other=0.0)
    q = tl.load(q_ptr + row[:, None] * Q_STRIDE + column[None, :], mask=mask, other=0.0)
    rate = tl.load(rates_ptr + head)
    if steps_ptr is None:
        step = tl.full([CHUNK], 1.0, tl.float32)
        decay = tl.where(exists, -rate, 0.0)
    else:
        steps = tl.load(steps_ptr + row * STEPS_STRIDE + head, mask=exists, other=0.0)
        step = time_steps(steps, bias_ptr, head, True, lowest, highest)
        decay = tl.where(exists, step * rate, 0.0)
    until, after = decays_around(decay)
    factor_ptrs = factors_ptr + head * num_tokens + row
    stride = HEADS * num_tokens
    tl.store(factor_ptrs, until, mask=exists)
    tl.store(factor_ptrs + stride, step * after, mask=exists)
    model: tl.constexpr = k.dtype
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    scores = product(q, tl.trans(k), zeros, model) * decays_between(decay) * step[None, :]
    score_ptrs = scores_ptr + (row * HEADS + head)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    size = tl.cast(stride, tl.int64) * CHUNK
    store_parts(score_ptrs, size, scores, exists[:, None], model)


@triton.jit(do_not_specialize=["first_seq", "num_tokens"])
def _decayed_chunks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    scores_ptr,
    factors_ptr,
    d_ptr,
    pool_ptr,
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    out_ptr,
    first_seq,
    num_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: the chunks of a sequence, a head and a tile of its value channels."""
    wait_for_launch_before(DEPENDENT)
    TILES: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    head, seq = tl.program_id(0) // TILES, first_seq + tl.program_id(1)
    start, position, count = chunks_of(starts_ptr, seq_lens_ptr, seq)
    if count == 0:
        return
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) % TILES * VALUES + tl.arange(0, VALUES)
    real_key, real_value = key < KEY_DIM, value < VALUE_DIM
    SIZE: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    in_state = (
        key[:, None] * KEY_STRIDE + value[None, :] * VALUE_STRIDE + head * (KEY_DIM * VALUE_DIM)
    )
    in_state_mask = real_key[:, None] & real_value[None, :]
    source, target = tl.load(slots_ptr + 2 * seq), tl.load(slots_ptr + 2 * seq + 1)
    state = load_state(pool_ptr, in_state, source, SIZE, in_state_mask)
    key_column = (head // GROUP * KEY_DIM + key)[None, :]
    value_column = (head * VALUE_DIM + value)[None, :]
    factors_ptr += head * num_tokens
    stride = HEADS * num_tokens
    size = tl.cast(stride, tl.int64) * CHUNK
    j = tl.arange(0, CHUNK)[None, :]
    zeros = tl.zeros([CHUNK, VALUES], tl.float32)
    model: tl.constexpr = k_ptr.dtype.element_ty
    for first in range(start - position % CHUNK, start + count, CHUNK):
        row = first + tl.arange(0, CHUNK)
        exists = (row >= start) & (row < start + count)
        row = row.to(tl.int64)
        mask = exists[:, None] & real_key[None, :]
        k = tl.load(k_ptr + row[:, None] * K_STRIDE + key_column, mask=mask, other=0.0)
        q = tl.load(q_ptr + row[:, None] * Q_STRIDE + key_column, mask=mask, other=0.0)
        mask = exists[:, None] & real_value[None, :]
        v = tl.load(v_ptr + row[:, None] * V_STRIDE + value_column, mask=mask, other=0.0)
        score_ptrs = scores_ptr + (row * HEADS + head)[:, None] * CHUNK + j
        scores_high = tl.load(score_ptrs, mask=exists[:, None], other=0.0)
        scores_low = tl.load(score_ptrs + size, mask=exists[:, None], other=0.0)
        until = tl.load(factors_ptr + row, mask=exists, other=0.0)
        of_updates = tl.load(factors_ptr + stride + row, mask=exists, other=0.0)
        whole = tl.load(factors_ptr + tl.minimum(first + CHUNK, start + count) - 1)
        result = product(q, state, zeros, model) * until[:, None]
        result = product_of_parts(scores_high, scores_low, v, result, model)
        wide = v.to(tl.float32)
        if d_ptr is not None:
            result += tl.load(d_ptr + head).to(tl.float32) * wide
        out_ptrs = out_ptr + row[:, None] * (HEADS * VALUE_DIM) + value_column
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        state = product(tl.trans(k), wide * of_updates[:, None], state * whole, model)
    store_state(pool_ptr, in_state, target, SIZE, state, in_state_mask)


def add_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Rates,
    d: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    first_seq: int,
    sizes: dict[str, Any],
    device: Device,
) -> None:
    """Compute the rows of sequences from `first_seq` on that are in chunks, and their states.

    Args:
        sizes: constants of the kernels and options of the launches.

    The other arguments are as for `paged_kernels._decayed_scan.decayed_scan`.
    """
    num_tokens, heads, value_dim = v.shape
    num_seqs = len(slots)
    # Scores, each as two numbers, and the factors of rows.
    scores = torch.empty((2, num_tokens, heads, CHUNK.value), dtype=q.dtype, device=q.device)
    factors = torch.empty((2, heads, num_tokens), dtype=torch.float32, device=q.device)
    config = decayed_chunks_config(device.arch, q.shape[2])
    tiles = num_tokens // CHUNK.value + 2 * (num_seqs - first_seq)
    _scores_kernel[(tiles, heads)](
        q,
        k,
        rates.rates,
        rates.steps,
        rates.bias,
        query_start_loc,
        seq_lens,
        scores,
        factors,
        *rates.limits,
        first_seq,
        num_seqs,
        num_tokens,
        num_warps=8,
        **_without(sizes, "VALUE_DIM", "V_STRIDE", "KEY_STRIDE", "VALUE_STRIDE"),
    )
    _decayed_chunks_kernel[(heads * triton.cdiv(value_dim, config.values), num_seqs - first_seq)](
        q,
        k,
        v,
        scores,
        factors,
        d,
        pool,
        slots,
        query_start_loc,
        seq_lens,
        out,
        first_seq,
        num_tokens,
        VALUES=config.values,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_without(sizes, "STEPS_STRIDE"),
    )


def _without(sizes: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if name not in names}
