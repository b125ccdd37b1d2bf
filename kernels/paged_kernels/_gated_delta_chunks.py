"""The gated delta rule for chunks of rows, by matrix products.

Yang et al., "Gated Delta Networks" (2024), section 3.3, after Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length" (2024), section 3. With L[i, j] = beta[i]
(k[i] k[j]) times the decay from j to i, for j < i, what is missing in the state for all rows of a
chunk is (I + L)^-1 times beta (v - decay S^T k). One launch inverts these matrices for all chunks;
another one goes through the chunks of each sequence with the state in registers.

The inverse is computed by forward substitution. Products of powers of L would need fewer steps, but
if keys are alike, their numbers grow like binomial coefficients and cancel.
"""

from __future__ import annotations

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
from paged_kernels._states import find_tile, load_state, store_state
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import Device
from paged_kernels.tuning.states import chunks_config


@triton.jit
def _inverse(lower):
    """Return (I + lower)^-1 for a strictly lower triangular matrix [CHUNK, CHUNK] in float32."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    columns = tl.trans(lower)
    inverse = tl.where(i == j, 1.0, 0.0)
    for row in range(1, CHUNK):
        factors = tl.sum(tl.where(j == row, columns, 0.0), 1)
        found = tl.sum(factors[:, None] * inverse, 0)
        inverse -= tl.where(i == row, found[None, :], 0.0)
    return inverse


@triton.jit
def _row_lengths(rows, eps):
    """Return the reciprocal lengths of keys or queries [CHUNK]."""
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "num_tokens"])
def _inverse_kernel(
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    starts_ptr,
    seq_lens_ptr,
    matrices_ptr,
    factors_ptr,
    first_seq,
    num_seqs,
    num_tokens,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: the matrices of a chunk and a value head that do not depend on the state."""
    wait_for_launch_before(DEPENDENT)
    head = tl.program_id(1)
    seq, chunk = find_tile(starts_ptr, tl.program_id(0), first_seq, num_seqs, CHUNK, 2)
    start, position, count = chunks_of(starts_ptr, seq_lens_ptr, seq)
    row = start - position % CHUNK + chunk * CHUNK + tl.arange(0, CHUNK)
    if chunk * CHUNK >= position % CHUNK + count:
        return
    exists = (row >= start) & (row < start + count)
    row = row.to(tl.int64)
    key = tl.arange(0, KEYS)
    mask = exists[:, None] & (key < KEY_DIM)[None, :]
    column = head // GROUP * KEY_DIM + key
    k = tl.load(k_ptr + row[:, None] * K_STRIDE + column[None, :], mask=mask, other=0.0)
    q = tl.load(q_ptr + row[:, None] * Q_STRIDE + column[None, :], mask=mask, other=0.0)
    at = row * HEADS + head
    decay = tl.load(decay_ptr + at, mask=exists, other=0.0)
    beta = tl.load(beta_ptr + at, mask=exists, other=0.0).to(tl.float32)
    of_keys = _row_lengths(k, eps)
    of_queries = _row_lengths(q, eps) * (KEY_DIM**-0.5)
    until, after = decays_around(decay)
    factor_ptrs = factors_ptr + head * num_tokens + row
    stride = HEADS * num_tokens
    tl.store(factor_ptrs, of_keys * until, mask=exists)
    tl.store(factor_ptrs + stride, of_queries * until, mask=exists)
    tl.store(factor_ptrs + 2 * stride, of_keys * after, mask=exists)
    tl.store(factor_ptrs + 3 * stride, until, mask=exists)

    between = decays_between(decay)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    model: tl.constexpr = k.dtype
    matrices_ptr += at[:, None] * CHUNK + j
    size = tl.cast(stride, tl.int64) * CHUNK
    scores = product(q, tl.trans(k), zeros, model) * between
    scores *= of_queries[:, None] * of_keys[None, :]
    store_parts(matrices_ptr + 2 * size, size, scores, exists[:, None], model)
    lower = product(k, tl.trans(k), zeros, model) * between
    lower *= (beta * of_keys)[:, None] * of_keys[None, :]
    inverse = _inverse(tl.where(i > j, lower, 0.0)) * beta[None, :]
    store_parts(matrices_ptr, size, inverse, exists[:, None], model)


@triton.jit(do_not_specialize=["first_seq", "num_tokens"])
def _gated_delta_chunks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    matrices_ptr,
    factors_ptr,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: the chunks of a sequence, a value head and a tile of its value channels."""
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
    in_state = (head * KEY_DIM + key)[:, None] * VALUE_DIM + value[None, :]
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
        matrix_ptrs = matrices_ptr + (row * HEADS + head)[:, None] * CHUNK + j
        inverse_high = tl.load(matrix_ptrs, mask=exists[:, None], other=0.0)
        inverse_low = tl.load(matrix_ptrs + size, mask=exists[:, None], other=0.0)
        scores_high = tl.load(matrix_ptrs + 2 * size, mask=exists[:, None], other=0.0)
        scores_low = tl.load(matrix_ptrs + 3 * size, mask=exists[:, None], other=0.0)
        factor_ptrs = factors_ptr + row
        of_keys = tl.load(factor_ptrs, mask=exists, other=0.0)
        of_queries = tl.load(factor_ptrs + stride, mask=exists, other=0.0)
        of_updates = tl.load(factor_ptrs + 2 * stride, mask=exists, other=0.0)
        last = tl.minimum(first + CHUNK, start + count) - 1
        whole = tl.load(factors_ptr + 3 * stride + last)
        missing = v.to(tl.float32) - product(k, state, zeros, model) * of_keys[:, None]
        missing = product_of_parts(inverse_high, inverse_low, missing, zeros, model)
        result = product(q, state, zeros, model) * of_queries[:, None]
        result = product_of_parts(scores_high, scores_low, missing, result, model)
        out_ptrs = out_ptr + row[:, None] * (HEADS * VALUE_DIM) + value_column
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
        missing *= of_updates[:, None]
        state = product(tl.trans(k), missing, state * whole, model)
    store_state(pool_ptr, in_state, target, SIZE, state, in_state_mask)


def add_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    first_seq: int,
    eps: float,
    device: Device,
) -> None:
    """Compute the rows of sequences from `first_seq` on that are in chunks, and their states.

    Arguments are as for `paged_kernels.gated_delta.gated_delta`, and were checked.
    """
    num_tokens, key_heads, key_dim = q.shape
    heads, value_dim = v.shape[1:]
    num_seqs = len(slots)
    # Inverses and scores, each as two numbers, and the factors of rows.
    matrices = torch.empty((4, num_tokens, heads, CHUNK.value), dtype=q.dtype, device=q.device)
    factors = torch.empty((4, heads, num_tokens), dtype=torch.float32, device=q.device)
    config = chunks_config(device.arch, key_dim)
    tiles = num_tokens // CHUNK.value + 2 * (num_seqs - first_seq)
    sizes = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY_DIM": key_dim,
        "Q_STRIDE": q.stride(0),
        "K_STRIDE": k.stride(0),
        "KEYS": triton.next_power_of_2(key_dim),
        **dependent_launch(device),
    }
    _inverse_kernel[(tiles, heads)](
        q,
        k,
        g,
        beta,
        query_start_loc,
        seq_lens,
        matrices,
        factors,
        first_seq,
        num_seqs,
        num_tokens,
        eps,
        num_warps=8,
        **sizes,
    )
    _gated_delta_chunks_kernel[
        (heads * triton.cdiv(value_dim, config.values), num_seqs - first_seq)
    ](
        q,
        k,
        v,
        matrices,
        factors,
        pool,
        slots,
        query_start_loc,
        seq_lens,
        out,
        first_seq,
        num_tokens,
        VALUE_DIM=value_dim,
        V_STRIDE=v.stride(0),
        VALUES=config.values,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **sizes,
    )
