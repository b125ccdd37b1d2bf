"""Benchmark of the gated delta rule of Qwen3-Next, and of Kimi-Linear with decays of channels."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.gated_delta import gated_delta
from states import StateBatch, prompts_one_by_one, time_batches

KEY_HEADS, HEADS, DIM = 16, 32, 128


def sizes(bench: Bench) -> tuple[int, int, int]:
    """Return key heads, value heads and dimension, tiny ones in a quick run."""
    return (1, 2, 16) if bench.quick else (KEY_HEADS, HEADS, DIM)


def make(
    bench: Bench, batch: StateBatch, *, of_channels: bool = False, chunked: bool = True
) -> Call:
    key_heads, heads, dim = sizes(bench)
    if of_channels:
        key_heads = heads
    rows = batch.num_tokens
    fused = bench.random(rows, 2 * key_heads + heads, dim)
    q, k, v = fused.split((key_heads, key_heads, heads), dim=1)
    decays = (rows, heads, dim) if of_channels else (rows, heads)
    g = -torch.rand(decays, device=bench.device)
    beta = torch.rand(rows, heads, dtype=torch.bfloat16, device=bench.device)
    pool = batch.pool(bench, heads, dim, dim)
    step = batch.long_step(bench, chunked=chunked)
    return partial(gated_delta, q, k, v, g, beta, pool, **step)


def run(bench: Bench) -> None:
    key_heads, heads, dim = sizes(bench)
    state = heads * dim * dim
    others = heads * (4 + 2)  # decay and beta
    row_bytes = 2 * (2 * key_heads + 2 * heads) * dim + others
    # Two products with the state, and one to update it.
    work = row_bytes, 4 * state, 6 * state
    time_batches(bench, "gated_delta", make, *work)
    one_by_one, prompts = partial(make, chunked=False), prompts_one_by_one(bench)
    time_batches(bench, "gated_delta one by one", one_by_one, *work, prompts)
    of_channels = partial(make, of_channels=True)
    row_bytes = 2 * 4 * heads * dim + 4 * heads * dim + 2 * heads
    time_batches(bench, "gated_delta of channels", of_channels, row_bytes, 4 * state, 6 * state)
