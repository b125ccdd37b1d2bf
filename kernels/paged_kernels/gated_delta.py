"""Linear attention by the gated delta rule, with a decay for each head or for each key channel.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), section 3.1, and for
the decay of each key channel Kimi Team, "Kimi Linear" (2025), section 3. Rows in
float32, and rows with a decay for each key channel, are computed one by one, others also in chunks,
by `_gated_delta_chunks.py`. `_states.py` and `_chunks.py` have what this promises.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._chunks import check_lengths, rows_in_chunks
from paged_kernels._gated_delta_chunks import add_chunks
from paged_kernels._states import (
    check_heads,
    check_pool,
    check_rows,
    check_step,
    load_state,
    store_state,
    zero_rows_of_no_sequence,
)
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning.states import scan_config

EPS = 1e-6
"""Added to the squared length of a query or key before its root is taken."""


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _gated_delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    pool_ptr,
    slots_ptr,
    starts_ptr,
    seq_lens_ptr,
    out_ptr,
    num_seqs,
    num_tokens,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    OF_CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: a sequence, a value head and a tile of its value channels, row by row.

    With `seq_lens_ptr`, which may be None, only rows that are not in chunks.
    """
    wait_for_launch_before(DEPENDENT)
    TILES: tl.constexpr = (VALUE_DIM + VALUES - 1) // VALUES
    head, seq = tl.program_id(0) // TILES, tl.program_id(1)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) % TILES * VALUES + tl.arange(0, VALUES)
    real_key, real_value = key < KEY_DIM, value < VALUE_DIM
    out_column = head * VALUE_DIM + value
    zero_rows_of_no_sequence(
        out_ptr, out_column, seq, num_seqs, num_tokens, starts_ptr, HEADS * VALUE_DIM, real_value
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
    at = (head * KEY_DIM + key)[:, None] * VALUE_DIM + value[None, :]
    mask = real_key[:, None] & real_value[None, :]
    state = load_state(pool_ptr, at, source, SIZE, mask)
    key_column = head // GROUP * KEY_DIM + key
    for index in tl.range(start, end, num_stages=STAGES):
        row = tl.cast(index, tl.int64)
        q = tl.load(q_ptr + row * Q_STRIDE + key_column, mask=real_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + row * K_STRIDE + key_column, mask=real_key, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * V_STRIDE + out_column, mask=real_value, other=0.0)
        beta = tl.load(beta_ptr + row * HEADS + head).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q) + eps) * (KEY_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k) + eps)
        if OF_CHANNELS:
            decay_ptrs = decay_ptr + (row * HEADS + head) * KEY_DIM + key
            decay = tl.load(decay_ptrs, mask=real_key, other=0.0)
            state *= tl.exp(decay)[:, None]
        else:
            state *= tl.exp(tl.load(decay_ptr + row * HEADS + head))
        recalled = tl.sum(state * k[:, None], 0)
        missing = (v.to(tl.float32) - recalled) * beta
        state += k[:, None] * missing[None, :]
        result = tl.sum(state * q[:, None], 0)
        out_ptrs = out_ptr + row * (HEADS * VALUE_DIM) + out_column
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=real_value)
    store_state(pool_ptr, at, target, SIZE, state, mask)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor | None = None,
    *,
    num_decodes: int = 0,
) -> Tensor:
    """Attend to states that each row corrects, in float32, rounded once.

    A row turns the state S of a value head into S' = exp(g) S + k (beta (v - (exp(g) S)^T k))^T,
    and its result is S'^T q. Queries and keys are divided by their lengths, and queries by the root
    of key_dim.

    Args:
        q: [num_tokens, key_heads, key_dim] bfloat16, float16 or float32. Its rows, and those of `k`
            and `v`, may be strided by multiples of 16 bytes.
        k: like `q`. A key head serves neighboring value heads.
        v: [num_tokens, heads, value_dim], dtype of `q`.
        g: the logarithm of the decay, at most 0, [num_tokens, heads] float32, or for each key
            channel [num_tokens, heads, key_dim] float32.
        beta: [num_tokens, heads], dtype of `q` or float32.
        pool: [num_slots, heads, key_dim, value_dim] bfloat16, float16 or float32; updated.
        slots: [num_seqs, 2] int32, the slot that a state is read from and the one that it is
            written to, which may be equal. Slot 0 is read as zeros.
        query_start_loc: [num_seqs + 1] int32; a sequence may have no rows, and then no state is
            written.
        seq_lens: [num_seqs] int32, the rows of each sequence in this and all earlier steps, for
            computing prompts in chunks; only read for sequences with several rows. With None, all
            rows are computed one by one: no bit depends on steps, and prompts take much longer.
        num_decodes: number of leading sequences with at most `FEW_ROWS` rows, which need no chunks;
            no length is read on the host.

    Returns:
        [num_tokens, heads, value_dim], dtype of `q`; zeros in rows of no sequence.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_rows("q", q, q, None, None, None, dtypes=MODEL_DTYPES)
    device = device_of("q", q)
    num_tokens, key_heads, key_dim = q.shape
    check_heads("q", q, q, num_tokens, key_heads, key_dim)
    check_heads("k", k, q, num_tokens, key_heads, key_dim)
    check_heads("v", v, q, num_tokens, None, None)
    _, heads, value_dim = v.shape
    divides = key_heads > 0 and heads % key_heads == 0
    check(divides, "v", f"must have a multiple of {key_heads} heads, got {heads}")
    of_channels = g.dim() == 3
    sizes = (num_tokens, heads, key_dim) if of_channels else (num_tokens, heads)
    check_tensor("g", g, sizes, torch.float32, like=q)
    check_tensor("beta", beta, (num_tokens, heads), (q.dtype, torch.float32), like=q)
    check_pool(pool, q, heads, key_dim, value_dim)
    num_seqs = check_step(q, slots, query_start_loc)
    check_lengths(q, seq_lens, num_seqs, num_decodes)
    out = torch.empty((num_tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    if of_channels or q.dtype == torch.float32:
        seq_lens = None
    if seq_lens is not None and num_decodes < num_seqs:
        add_chunks(
            q, k, v, g, beta, pool, slots, query_start_loc, seq_lens, out,
            first_seq=num_decodes, eps=EPS, device=device,
        )  # fmt: skip
    config = scan_config(key_dim, value_dim)
    tiles = triton.cdiv(value_dim, config.values)
    _gated_delta_kernel[(heads * tiles, num_seqs)](
        q,
        k,
        v,
        g,
        beta,
        pool,
        slots,
        query_start_loc,
        seq_lens,
        out,
        num_seqs,
        num_tokens,
        EPS,
        HEADS=heads,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        Q_STRIDE=q.stride(0),
        K_STRIDE=k.stride(0),
        V_STRIDE=v.stride(0),
        OF_CHANNELS=of_channels,
        KEYS=triton.next_power_of_2(key_dim),
        VALUES=config.values,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **dependent_launch(device),
    )
    return out
