"""Sums of products of keys and values that decay by a factor for each head.

This is what Mamba-2's state space and linear attention with a fixed decay have in common (Dao and
Gu, "Transformers are SSMs", 2024, section 5). A row with key k, query q, value v and time step t
turns the state S of a head into exp(t rate) S + t k v^T, and its result is S^T q + d v. Without
time steps it is exp(-rate) S + k v^T. Rows in float32 are computed one by one, others also in
chunks, by `_decayed_chunks.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._chunks import rows_in_chunks
from paged_kernels._decayed_chunks import add_chunks
from paged_kernels._rates import Rates, time_steps
from paged_kernels._states import load_state, store_state, zero_rows_of_no_sequence
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import Device
from paged_kernels.tuning.states import decayed_scan_config


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _decayed_scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    rates_ptr,
    steps_ptr,
    bias_ptr,
    d_ptr,
    pool_ptr,
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    out_ptr,
    lowest,
    highest,
    num_seqs,
    num_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    STEPS_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: a sequence, a head and a tile of its value channels, row by row.

    With `seq_lens_ptr`, which may be None, only rows that are not in chunks.
    """
    wait_for_launch_before(DEPENDENT)
    TILES: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    head, seq = tl.program_id(0) // TILES, tl.program_id(1)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) % TILES * VALUES + tl.arange(0, VALUES)
    real_key, real_value = key < KEY_DIM, value < VALUE_DIM
    value_column = head * VALUE_DIM + value
    zero_rows_of_no_sequence(
        out_ptr, value_column, seq, num_seqs, num_tokens, starts_ptr, HEADS * VALUE_DIM, real_value
    )
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    source, target = tl.load(slots_ptr + 2 * seq), tl.load(slots_ptr + 2 * seq + 1)
    if seq_lens_ptr is not None:
        chunked = rows_in_chunks(end - start, tl.load(seq_lens_ptr + seq))
        source = tl.where(chunked > 0, target, source)
        start += chunked
    if start == end:
        return
    SIZE: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    at = key[:, None] * KEY_STRIDE + value[None, :] * VALUE_STRIDE + head * (KEY_DIM * VALUE_DIM)
    mask = real_key[:, None] & real_value[None, :]
    state = load_state(pool_ptr, at, source, SIZE, mask)
    rate = tl.load(rates_ptr + head)
    key_column = head // GROUP * KEY_DIM + key
    for index in tl.range(start, end, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        q = tl.load(q_ptr + row * Q_STRIDE + key_column, mask=real_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * K_STRIDE + key_column, mask=real_key, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * V_STRIDE + value_column, mask=real_value, other=0.0)
        v = v.to(tl.float32)
        if steps_ptr is None:
            state = state * tl.exp(-rate) + k[:, None] * v[None, :]
        else:
            steps = tl.load(steps_ptr + row * STEPS_STRIDE + head)
            step = time_steps(steps, bias_ptr, head, True, lowest, highest)
            state = state * tl.exp(step * rate) + k[:, None] * (step * v)[None, :]
        result = tl.sum(state * q[:, None], 0)
        if d_ptr is not None:
            result += tl.load(d_ptr + head).to(tl.float32) * v
        out_ptrs = out_ptr + row * (HEADS * VALUE_DIM) + value_column
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=real_value)
    store_state(pool_ptr, at, target, SIZE, state, mask)


def decayed_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: Rates,
    d: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor | None,
    *,
    keys_last: bool,
    num_decodes: int,
    device: Device,
) -> Tensor:
    """Return the results of all rows, and update the pool. All arguments were checked.

    Args:
        q: [num_tokens, key_heads, key_dim], strided rows; each head serves neighboring value heads.
        k: like `q`.
        v: [num_tokens, heads, value_dim], strided rows.
        rates: the decays and time steps.
        d: [heads], times the value added to a result, or None.
        pool: [num_slots, heads, value_dim, key_dim] if `keys_last`, else with the last dimensions
            in the other order.
        slots: [num_seqs, 2] int32.
        query_start_loc: [num_seqs + 1] int32.
        seq_lens: [num_seqs] int32, or None for no chunks.
        keys_last: the order of a state's dimensions.
        num_decodes: number of leading sequences without chunks.
        device: where the launch runs.

    Returns:
        [num_tokens, heads, value_dim], dtype of `q`.
    """
    num_tokens, key_heads, key_dim = q.shape
    _, heads, value_dim = v.shape
    num_seqs = len(slots)
    out = torch.empty((num_tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    sizes = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "Q_STRIDE": q.stride(0),
        "K_STRIDE": k.stride(0),
        "V_STRIDE": v.stride(0),
        "STEPS_STRIDE": 0 if rates.steps is None else rates.steps.stride(0),
        "KEY_STRIDE": 1 if keys_last else value_dim,
        "VALUE_STRIDE": key_dim if keys_last else 1,
        "KEYS": triton.next_power_of_2(key_dim),
        **dependent_launch(device),
    }
    if q.dtype == torch.float32:
        seq_lens = None
    if seq_lens is not None and num_decodes < num_seqs:
        add_chunks(
            q, k, v, rates, d, pool, slots, query_start_loc, seq_lens, out,
            first_seq=num_decodes, sizes=sizes, device=device,
        )  # fmt: skip
    config = decayed_scan_config(key_dim, value_dim)
    _decayed_scan_kernel[(heads * triton.cdiv(value_dim, config.values), num_seqs)](
        q,
        k,
        v,
        rates.rates,
        rates.steps,
        rates.bias,
        d,
        pool,
        slots,
        query_start_loc,
        seq_lens,
        out,
        *rates.limits,
        num_seqs,
        num_tokens,
        VALUES=config.values,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **sizes,
    )
    return out
